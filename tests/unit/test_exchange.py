# SPDX-License-Identifier: Apache-2.0
"""The comparison of ranks' plans: which plans count as equal, and how differences are reported."""

from __future__ import annotations

import json

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.exchange import difference

GATHER = "g0: all_gather bfloat16 [8, 16] in all_gather_matmul by ring/p2p (route=ring, sub_chunks=4)"
REDUCE = "g0: all_reduce(sum) bfloat16 [8, 16] cut [1, 4] in matmul_all_reduce by ring/p2p (route=owner, sub_chunks=4)"
KEPT = "g0: all_reduce bfloat16 kept"


def _plan(*steps: str, mode: str = "on", **config: object) -> ExchangePlan:
    return ExchangePlan("1.0", mode, steps, any("kept" not in s for s in steps), config)


def test_the_digest_covers_what_moves_and_not_how_it_was_switched_on() -> None:
    assert _plan(GATHER).digest == _plan(GATHER, mode="strict", sub_chunks=4, dump="x").digest
    assert (
        len({_plan(*steps).digest for steps in ((GATHER,), (GATHER, REDUCE), (REDUCE, GATHER), (GATHER, KEPT), ())})
        == 5
    )
    assert _plan(KEPT, mode="off").digest != _plan(KEPT).digest
    assert ExchangePlan("2.0", "on", (GATHER,)).digest != ExchangePlan("1.0", "on", (GATHER,)).digest


def test_a_plan_can_be_written_as_text_and_read_back() -> None:
    plan = _plan(GATHER, KEPT, patterns=("a", "b"), schedule="ring")
    read = ExchangePlan.from_json(plan.to_json())
    assert read == plan and read.digest == plan.digest == json.loads(plan.to_json())["plan"] and read.overlaps


def test_plans_name_a_collective_alike_whether_it_is_overlapped_or_kept() -> None:
    assert _plan(GATHER, REDUCE).collectives == _plan(KEPT, GATHER).collectives == ("g0: all_gather", "g0: all_reduce")
    assert _plan(GATHER).collectives != _plan(GATHER, KEPT).collectives


def test_ranks_of_one_plan_are_named_together() -> None:
    mine = _plan(GATHER, REDUCE, sub_chunks=4)
    text = difference(
        mine,
        {
            1: mine,
            2: _plan(GATHER, KEPT, sub_chunks=4),
            3: _plan(GATHER, KEPT, sub_chunks=4),
            5: _plan(GATHER, sub_chunks=2),
        },
    )
    assert text.split("; ") == [
        f"ranks 2, 3: transfer 2 is {REDUCE} here and {KEPT} there",
        f"rank 5: 2 transfers here and 1 there, transfer 2 is {REDUCE} here and nothing there,"
        " sub_chunks is 4 here and 2 there",
    ]
    assert difference(mine, {1: mine}) == ""
    assert difference(mine, {1: _plan(mode="off")}) == "rank 1: OVERLAP_INDUCTOR is on here and off there"


def test_collectives_of_a_group_are_counted_in_joined_plans() -> None:
    def plan(groups: tuple[str, ...], *steps: str) -> ExchangePlan:
        return ExchangePlan("1", "on", steps, groups=(groups,))

    one, two = plan(("tp", "dp"), GATHER, "g1: all_reduce float32 kept", KEPT), plan(("dp",), KEPT)
    assert [one.count_in(g) for g in ("tp", "dp", "pp")] == [2, 1, 0] and plan(()).count_in("tp") == 0
    assert [ExchangePlan.joined([one, two]).count_in(g) for g in ("tp", "dp", "pp")] == [2, 2, 0]

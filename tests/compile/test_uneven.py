# SPDX-License-Identifier: Apache-2.0
"""Ranks whose graphs differ (uneven shards, a bias on one rank): their sites have equal ids. All ranks run the
same transfers, of the same sizes, in the same order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites.sizes import rounded
from overlap_inductor.torch_compat import symmetric
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_by_fields
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.uneven_cases import cases

MOVES = re.compile(
    r"(overlap_inductor\.(?:gather_|exchange_|matmul_|all_gather_|reduce_tail)\w*|_c10d_functional\.\w+)"
    r"\.default\((.*)\)"
)


def exchange(report: OverlapReport) -> list[Any]:
    """What must be equal on all ranks: plan hash, ops that move data, sites' plans and near misses. The ops are in
    order, without the names of their operands."""
    moved = []
    for name, arguments in (m.groups() for m in map(MOVES.search, report.after.splitlines()) if m):
        moved.append((name, re.findall(r"'[^']*'|\[[\d, ]*\]|(?<![\w.])\d+|torch\.\w+", arguments)))
    sites = [
        (s.facts.id, s.facts.collective, [(p.schedule, p.transport, p.tokens, p.parameters) for p in s.decision.plan])
        for s in report.sites
    ]
    return [
        report.plan_hash,
        moved,
        sites,
        [(m.collective.kind, m.collective.bytes, m.reason.code) for m in report.near_misses],
    ]


BUDGETS: dict[str, dict[str, Any]] = {
    "unrolled": {"sub_chunks": 2},
    "looping": {"step_node_budget": 1},
    "some of each": {"step_node_budget": 60},
}
WITH_EVERY_BUDGET = (
    "head of a batch, with bias and activation",
    "uneven K, a bias added on one rank",
    "gather uneven rows, multiply and contract",
    "scatter a sum of matmuls to an uneven sequence",
)
"""One case of each pattern that ``cases`` has. ``make test`` runs these with each budget, and the other cases only
unrolled."""


def check_exchanges(name: str, world_size: int, ranks: Iterable[int], budgets: Iterable[dict[str, Any]]) -> None:
    """Assert, for each budget, that ``exchange`` returns equal values for all ``ranks``."""
    found = []
    for rank in ranks:
        with fake_group(world_size, rank):
            function, shapes, _ = cases(rank, world_size)[name]
            reports = reports_by_fields(function, *(torch.randn(s) for s in shapes), several=[*budgets])
            found.append([exchange(report) for (report,) in reports])
    for of_ranks in zip(*found, strict=True):
        assert of_ranks[0][2] and all(f == of_ranks[0] for f in of_ranks), of_ranks


@pytest.mark.parametrize("name", cases(0, 2))
def test_the_first_and_the_last_rank_exchange_alike(name: str) -> None:
    """All ranks must choose the same bands and ids, and unroll the same sites within a budget. If one rank alone
    has a bias, it is rank 0. If one shard is smaller, it is the last rank's. So the
    graphs of these two ranks differ."""
    budgets = BUDGETS if name in WITH_EVERY_BUDGET else ("unrolled",)
    check_exchanges(name, 3, (0, 2), [BUDGETS[b] for b in budgets])


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", cases(0, 2))
def test_all_ranks_exchange_alike(name: str, world_size: int) -> None:
    check_exchanges(name, world_size, range(world_size), BUDGETS.values())


def layer(inner: int, bias: bool, adds: int = 0) -> HandGraph:
    """A bf16 layer on GPUs: a matmul, then an all-reduce. The weight has ``inner`` rows. ``adds``: number of additions
    between the matmul and the all-reduce."""
    made = HandGraph()
    x, w = (
        made.on("cuda:0", 8192, inner, dtype=torch.bfloat16),
        made.on("cuda:0", inner, 4096, dtype=torch.bfloat16, name="w"),
    )
    b = made.on("cuda:0", 4096, dtype=torch.bfloat16, name="b")
    y = made.call(aten.addmm.default, b, x, w) if bias else made.mm(x, w)
    for _ in range(adds):
        y = made.call(aten.add.Tensor, y, b)
    return made.output(made.reduce(y))


def test_estimates_are_the_same_on_every_rank() -> None:
    """If 3 ranks divide K = 11008, a rank's own K is 3670 or 3668. Estimates from each rank's own K could lead to
    different choices."""
    with fake_group(3):
        found = []
        for inner, bias in ((3670, True), (3670, False), (3668, False)):
            report = layer(inner, bias).run(schedule="auto")
            found.append([(s.facts.id, s.decision.status, s.decision.source, s.decision.plan) for s in report.sites])
    assert found[0][0][3][0].estimate_us and found[0] == found[1] == found[2]


@pytest.mark.parametrize("total", [11008, 14336, 28672, 101, 32001, 50257, 128256, 151936])
@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8])
def test_sizes_of_uneven_shards_round_to_the_same(total: int, world_size: int) -> None:
    """Shards of 101 may round to different sizes, because 101 is small."""
    shards = {len(c) for c in torch.arange(total).chunk(world_size)}
    assert len({rounded(s) for s in shards}) == 1 or total == 101
    assert all(abs(s - rounded(s)) <= s / 32 for s in shards)


@pytest.mark.parametrize("budget", range(20, 90, 10))
def test_a_bias_of_one_rank_does_not_change_which_sites_are_unrolled(budget: int) -> None:
    """A rank may have no bias, a bias inside the matmul, or a bias that is added after the matmul. All ranks must
    unroll the same sites."""
    with fake_group(2):
        reports = [
            layer(2048, bias, adds).run(step_node_budget=budget) for bias, adds in ((False, 0), (True, 0), (False, 1))
        ]
    unrolled = [[s.decision.moving.parameters.get("unrolled") for s in r.sites] for r in reports]
    assert unrolled[0] == unrolled[1] == unrolled[2], reports


def test_a_fused_gather_is_sliced_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are pushed and awaited one by one. A rank whose weight has one more tile must not wait for a slice that no
    peer pushes."""
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)
    found = []
    for rank, columns in enumerate((2312, 2304)):
        with fake_group(2, rank):
            made = HandGraph()
            x, w = (
                made.on("cuda:0", 896, 1024, dtype=torch.bfloat16),
                made.on("cuda:0", 1024, columns, dtype=torch.bfloat16, name="w"),
            )
            (site,) = made.output(made.mm(made.gather(x), w)).run(schedule="fused").sites
            settings = site.decision.moving.parameters["settings"]
        shard, weight = torch.empty(896, 1024, device="meta"), torch.empty(1024, columns, device="meta")
        parameters = fused_plan.parameters_of(settings, 132)
        own = fused_plan.slices_of(2, shard, [weight], dataclasses.replace(parameters, column_tiles=0))
        found.append((settings, fused_plan.slices_of(2, shard, [weight], parameters), own))
        # A copy engine sends a shard of at least ``copies_from`` bytes, and sends it whole.
        copied = dataclasses.replace(parameters, copies_from=shard.nbytes)
        assert fused_plan.slices_of(2, shard, [weight], copied) == 1
    assert found[0][:2] == found[1][:2] and found[0][2] != found[1][2], found

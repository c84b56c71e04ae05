# SPDX-License-Identifier: Apache-2.0
"""Two seams form a chain if the second one multiplies rows that the first one's gather has multiplied. A band's
products are then multiplied again, and sent before the first gather's next band is multiplied."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from overlap_inductor.passes import rewrite
from overlap_inductor.passes.sequence.seams import chains
from overlap_inductor.passes.sequence.seams import write_chain
from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

TORCH = "2.13"
"""The golden file is for this torch version."""
GOLDEN = {2: "sequence/chain_2.txt", 4: "sequence/chain_4.txt"}
HIDDEN, INNER = 32, 48
SLOW = json.dumps({"link_bytes": 5e7, "matmul_flops": {"4": 5e10}})


def _gated(made: HandGraph, gathered: fx.Node) -> fx.Node:
    gate, up = (made.mm(gathered, made.input(HIDDEN, INNER, name=name)) for name in ("gate", "up"))
    return made.call(aten.mul.Tensor, made.call(aten.relu.default, gate), up)


def _summed(made: HandGraph, gathered: fx.Node) -> fx.Node:
    """A sum over earlier tokens stands between the two matmuls, so no band of it can be computed alone."""
    return made.call(aten.cumsum.default, _gated(made, gathered), 0)


def _norm(made: HandGraph, rows: fx.Node) -> fx.Node:
    return made.call(aten.div.Tensor, rows, made.call(aten.amax.default, rows, [-1], True))


def _alone(made: HandGraph, gathered: fx.Node, result: fx.Node) -> fx.Node:
    """What is scattered: the matmul's result."""
    return result


def _with_earlier_tokens(made: HandGraph, gathered: fx.Node, result: fx.Node) -> fx.Node:
    """A sum over all gathered tokens is added to the matmul's result before the scatter."""
    return made.call(aten.add.Tensor, result, made.call(aten.cumsum.default, gathered, 0))


def _with_a_collective(made: HandGraph, gathered: fx.Node, result: fx.Node) -> fx.Node:
    """An all-reduced row is added. Its collective stands behind the first gather, and should stay there."""
    return made.call(aten.add.Tensor, result, made.reduce(made.input(HIDDEN, name="row")))


def _with_a_random_row(made: HandGraph, gathered: fx.Node, result: fx.Node) -> fx.Node:
    return made.call(aten.add.Tensor, result, made.call(aten.rand_like.default, made.input(HIDDEN, name="row")))


def _weight_gradient(made: HandGraph, gathered: fx.Node) -> fx.Node:
    """The gathered rows are summed over: ``[X, tokens] @ [tokens, HIDDEN]``."""
    return made.mm(made.input(24, gathered.meta["val"].shape[0], name="other"), gathered)


def _q(made: HandGraph, gathered: fx.Node) -> fx.Node:
    return made.mm(gathered, made.input(HIDDEN, 24, name="q"))


def _graph(
    inner: Callable[[HandGraph, fx.Node], fx.Node] = _gated,
    tokens: int = 64,
    read: str = "",
    scattered: Callable[[HandGraph, fx.Node, fx.Node], fx.Node] = _alone,
    last: Callable[[HandGraph, fx.Node], fx.Node] = _q,
) -> HandGraph:
    """``read``: where another matmul reads a view of the inner result: ``before`` or ``after`` the second seam. The
    view is then also a result of the graph."""

    def other() -> list[fx.Node]:
        view = made.view(middle, 1, tokens, INNER)
        return [view, made.mm(made.view(view, tokens, INNER), made.input(INNER, 8, name="other"))]

    made = HandGraph()
    x = made.input(tokens, 16)
    residual = made.input(tokens // made.world_size, HIDDEN, name="residual")
    rows = made.call(aten.add.Tensor, made.scatter(made.mm(x, made.input(16, HIDDEN, name="o"))), residual)
    gathered = made.gather(_norm(made, rows))
    middle = inner(made, gathered)
    early = other() if read == "before" else []
    down = made.mm(middle, made.input(INNER, HIDDEN, name="down"))
    later = made.call(aten.add.Tensor, made.scatter(scattered(made, gathered, down)), rows)
    q = last(made, made.gather(_norm(made, later)))
    return made.output(q, later, *early, *(other() if read == "after" else []))


def _plans(report: OverlapReport) -> list[tuple[Any, Any]]:
    """For each site: the number of bands, and whether the plan has ``chained``."""
    assert not report.failures
    plans = [s.decision.moving.parameters for s in report.sites]
    return [(p.get("bands"), p.get("chained")) for p in plans]


CHAINED = [(2, None), (2, None), (2, True), (2, None)]
APART = [(2, None)] * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_golden(world_size: int) -> None:
    with fake_group(world_size):
        report = _graph(tokens=32 * world_size).run(sub_chunks=2)
    assert _plans(report) == CHAINED
    if torch.__version__.startswith(TORCH):
        check_golden(f"before\n{report.before}\nafter\n{report.after}", GOLDEN[world_size])


@pytest.mark.parametrize(("world_size", "bands"), [(2, 2), (2, 4), (3, 4), (4, 4), (4, 8)])
def test_bands_are_sent_on_before_the_next_ones_are_multiplied(world_size: int, bands: int) -> None:
    with fake_group(world_size):
        report = _graph(tokens=world_size * 16).run(sub_chunks=bands)
    lines = report.after.splitlines()
    scatter, gather = (
        next(s.facts.id for s in report.sites[start:] if s.facts.pattern == pattern)
        for start, pattern in ((2, "matmul_reduce_scatter"), (0, "all_gather_matmul"))
    )

    def places(op: str, site: str) -> list[int]:
        return [i for i, line in enumerate(lines) if op in line and f"'{site}'" in line]

    arrivals, sends, waits = (
        places("exchange_wait", gather), places("exchange_send", scatter), places("exchange_wait", scatter)
    )  # fmt: skip
    count = len(sends) // bands
    for band in range(bands - 1):
        assert arrivals[band] < sends[band * count] and sends[(band + 1) * count - 1] < arrivals[band + 1]
    # A band of the second gather is sent as soon as the next band of the scatter is on its way.
    for band in range(bands - 2):
        assert sends[(band + 2) * count - 1] < waits[band] < arrivals[band + 2]
    second = report.sites[3].facts.id
    early = [i for i in places("exchange_wait", second) if i < waits[-1]]
    assert len(early) == max(bands - 2, 0)


def test_a_seam_behind_another_op_is_not_chained() -> None:
    with fake_group(2):
        assert _plans(_graph(_summed).run(sub_chunks=2)) == APART


def _times_a_number(made: HandGraph, gathered: fx.Node, result: fx.Node) -> fx.Node:
    """The matmul's result is multiplied by the largest gathered number, a scalar in Python."""
    number = made.call(aten._local_scalar_dense.default, made.call(aten.amax.default, gathered))
    return made.call(aten.mul.Tensor, result, number)


@pytest.mark.parametrize("what", [_with_earlier_tokens, _with_a_collective, _with_a_random_row, _times_a_number])
def test_a_seam_that_needs_more_than_the_first_gather_gives_is_not_chained(what: Any) -> None:
    """In a chain, ``cumsum`` would read gathered rows before they have arrived, and the collective would run before its
    program says so."""
    with fake_group(2):
        assert _plans(_graph(scattered=what).run(sub_chunks=2)) == APART


def test_a_sum_over_gathered_rows_is_not_chained() -> None:
    """It adds up the rank's own bands first, and would read the last of them before it is computed."""
    with fake_group(2):
        plans = _plans(_graph(last=_weight_gradient).run(sub_chunks=4))
    assert [chained for _, chained in plans] == [None] * 4 and plans[3][0] == 4


def test_seams_with_other_numbers_of_joined_ranks_are_not_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "gather_groups", lambda *arguments: [])
    with fake_group(4):
        assert _plans(_graph(tokens=128).run(sub_chunks=2)) == APART


@pytest.mark.parametrize("read", ["before", "after"])
def test_a_result_that_is_also_read_elsewhere_is_kept_until_its_pieces_were_sent(read: str) -> None:
    """On 2 ranks, the pieces lie in the memory of the whole result."""
    with fake_group(2):
        report = _graph(read=read).run(sub_chunks=2)
    assert _plans(report) == CHAINED
    lines = report.after.splitlines()
    (whole,) = [i for i, line in enumerate(lines) if line.startswith("assemble") and f"[64, {INNER}]" in line]
    name = lines[whole].split(":")[0]
    (kept,) = [line for line in lines if f"after.default({name}, " in line]
    assert f"'{report.sites[2].facts.id}'" in next(
        line for line in lines if line.startswith(kept.rsplit(", ", 1)[1].rstrip(")") + ":")
    )
    assert all(line.startswith(("assemble", "after")) for line in lines if f"({name}, " in line)


def test_estimates_choose_the_bands_of_a_chain() -> None:
    """The sizes are those of a Llama layer on 4 ranks of a slow link. Without a chain, the second seam takes longer in
    bands than its two sites one after the other."""

    def report() -> OverlapReport:
        made = HandGraph()
        x, residual = made.input(1024, 512), made.input(256, 2048, name="residual")
        rows = made.call(aten.add.Tensor, made.scatter(made.mm(x, made.input(512, 2048, name="o"))), residual)
        gathered = made.gather(_norm(made, rows))
        gate, up = (made.mm(gathered, made.input(2048, 1408, name=name)) for name in ("gate", "up"))
        inner = made.call(aten.mul.Tensor, made.call(aten.relu.default, gate), up)
        later = made.call(aten.add.Tensor, made.scatter(made.mm(inner, made.input(1408, 2048, name="down"))), rows)
        q = made.gather(_norm(made, later))
        made.output(*[made.mm(q, made.input(2048, 512, name=name)) for name in "qkv"], later)
        return made.run(mode="report", schedule="auto", machine=SLOW)

    with fake_group(4):
        assert _plans(report()) == [(4, None), (4, None), (4, True), (4, None)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chains, "groups_agree", lambda *arguments: False)
            assert _plans(report()) == [(4, None), (4, None), (None, None), (None, None)]


@pytest.mark.parametrize("cause", ["a write that may not move", "pieces that do not fit"])
def test_a_chain_that_fails_leaves_its_sites_overlapped(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cause == "a write that may not move":
        monkeypatch.setattr(write_chain, "_placed", lambda graph, site: [])
    else:
        monkeypatch.setattr(write_chain, "_pieces", lambda base, world_size: {})
    with fake_group(4):
        report = _graph(tokens=256).run(sub_chunks=4)
    (failure,) = report.failures
    assert failure.stage == "chain" and failure.sites == [s.facts.id for s in report.sites]
    assert [s.decision.status for s in report.sites] == ["overlapped"] * 4
    assert [s.decision.moving.parameters.get("bands") for s in report.sites] == [4] * 4
    assert "as a chain" in report.notices[0]


def test_a_seam_is_in_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four seams in a row, the first two are a chain, and so are the last two."""
    written: list[Any] = []
    monkeypatch.setattr(rewrite, "write_chain", lambda chain, *rest: written.append(chain))
    with fake_group(2):
        made = HandGraph()
        rows = made.scatter(made.mm(made.input(64, 16), made.input(16, HIDDEN, name="w")))
        for layer in range(3):
            inner = made.mm(made.gather(_norm(made, rows)), made.input(HIDDEN, INNER, name=f"up{layer}"))
            rows = made.scatter(made.mm(inner, made.input(INNER, HIDDEN, name=f"down{layer}")))
        made.output(made.mm(made.gather(rows), made.input(HIDDEN, 24, name="q"))).run(sub_chunks=2)
    of = [seam.scatter.facts.id for chain in written for seam in (chain.first, chain.second)]
    assert len(of) == 4 == len(set(of))

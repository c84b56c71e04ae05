# SPDX-License-Identifier: Apache-2.0
"""A seam may be written in bands only if it keeps all rules of ``seams.check``. Some of the rules are about the
seam's graph, the others about the plans of the seam's two sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from overlap_inductor.passes import rewrite
from overlap_inductor.passes.sequence.seams import check
from overlap_inductor.passes.sequence.seams import write
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

TORCH = "2.13"
"""The golden file is for this torch version."""
SLOW = json.dumps({"link_bytes": 2.93e5, "matmul_flops": {"4": 3.6e7}})
FAST = json.dumps({"link_bytes": 1e12, "matmul_flops": {"4": 1e13}})


def _residual_and_norm(made: HandGraph, scattered: fx.Node) -> fx.Node:
    """``p / max(p)``, where ``p = relu(scattered + residual)`` and the maximum is over the features."""
    rows, features = scattered.meta["val"].shape
    residual = made.call(aten.add.Tensor, scattered, made.input(rows, features, name="residual"))
    positive = made.call(aten.relu.default, residual)
    return made.call(aten.div.Tensor, positive, made.call(aten.amax.default, positive, [-1], True))


def _relu(made: HandGraph, scattered: fx.Node) -> fx.Node:
    return made.call(aten.relu.default, scattered)


def _multiplied(made: HandGraph, gathered: fx.Node, scattered: fx.Node) -> fx.Node:
    return made.mm(gathered, made.input(gathered.meta["val"].shape[1], 48, name="up"))


@dataclass(frozen=True)
class Parts:
    """What a seam is made of. ``dynamic``: dims of the first input that have symbolic sizes."""

    tokens: int = 64
    dynamic: tuple[int, ...] = ()
    scatter: Callable[[HandGraph, fx.Node], fx.Node] = HandGraph.scatter
    between: Callable[[HandGraph, fx.Node], fx.Node] = _relu
    gather: Callable[[HandGraph, fx.Node], fx.Node] = HandGraph.gather
    multiply: Callable[[HandGraph, fx.Node, fx.Node], fx.Node] = _multiplied

    def seam(self) -> HandGraph:
        made = HandGraph()
        x = made.input(self.tokens, 32, dynamic=self.dynamic)
        scattered = self.scatter(made, made.mm(x, made.input(32, 64, name="w")))
        gathered = self.gather(made, self.between(made, scattered))
        return made.output(self.multiply(made, gathered, scattered))


def _bands(parts: Parts, **fields: Any) -> list[Any]:
    """The number of bands in each site's plan, or ``None`` for a plan without bands. The graph is not rewritten."""
    with fake_group(2):
        report = parts.seam().run(mode="report", **{"sub_chunks": 2, **fields})
    assert [s.facts.pattern for s in report.sites] == ["matmul_reduce_scatter", "all_gather_matmul"]
    assert all(s.decision.moving.schedule == "ring" for s in report.sites)
    return [s.decision.moving.parameters.get("bands") for s in report.sites]


def test_bands_of_tiny_matmuls_on_many_ranks() -> None:
    """A gather in bands has fewer hops than the same gather without bands. Here the saved hops take longer than
    the steps that bands add, and also longer than both sites' matmuls. So the estimated added time is negative. The
    seam must still get bands."""
    with fake_group(8):
        report = Parts(tokens=400, between=_residual_and_norm).seam().run(mode="report", sub_chunks=2)
    assert [s.decision.moving.parameters.get("bands") for s in report.sites] == [2, 2]


def test_golden() -> None:
    with fake_group(2):
        report = Parts(between=_residual_and_norm).seam().run(sub_chunks=2)
    assert not report.failures and [s.decision.moving.parameters["bands"] for s in report.sites] == [2, 2]
    if torch.__version__.startswith(TORCH):
        check_golden(f"before\n{report.before}\nafter\n{report.after}", "sequence/seam.txt")


def _expanded_between(made: HandGraph, scattered: fx.Node) -> fx.Node:
    """A mean is expanded to all features, as in the backward of a norm. This view is not contiguous."""
    mean = made.call(aten.mean.dim, scattered, [-1], True)
    return made.call(aten.mul.Tensor, scattered, made.call(aten.expand.default, mean, scattered.meta["val"].shape))


def test_a_view_that_is_not_contiguous_is_cut() -> None:
    assert _bands(Parts(between=_expanded_between)) == [2, 2]


def _reduced_between(made: HandGraph, scattered: fx.Node) -> fx.Node:
    """An all-reduce stands between the scatter and the gather. The rows do not depend on it."""
    made.reduce(made.input(4, name="other"))
    return _relu(made, scattered)


def _written_between(made: HandGraph, scattered: fx.Node) -> fx.Node:
    made.call(aten.add_.Tensor, made.input(4, name="other"), 1.0)
    return _relu(made, scattered)


def _multiplied_by_rows(made: HandGraph, gathered: fx.Node, scattered: fx.Node) -> fx.Node:
    """The weight is computed from the scattered rows."""
    sums = made.call(aten.sum.dim_IntList, scattered, [0])
    return made.mm(gathered, made.call(aten.mul.Tensor, made.view(sums, 64, 1), made.input(1, 48, name="up")))


def _mean_read_outside(made: HandGraph, scattered: fx.Node) -> fx.Node:
    """``var_mean`` returns a variance and a mean. The rows are divided by the variance. An op outside the seam reads
    the mean."""
    both = made.call(aten.var_mean.correction, scattered, [-1], correction=0, keepdim=True)
    made.call(aten.neg.default, made.call(getitem, both, 1))
    return made.call(aten.div.Tensor, scattered, made.call(getitem, both, 0))


BROKEN = {
    "scattered features": ("_scatters_rows", Parts(scatter=lambda made, x: made.scatter_on(x, 1))),
    "gathered features": ("_gathers_rows", Parts(gather=lambda made, x: made.gather_on(x, 1))),
    "a sum over earlier tokens": ("_row_wise", Parts(between=lambda made, x: made.call(aten.cumsum.default, x, 0))),
    "one of several results is read elsewhere": ("_joinable", Parts(between=_mean_read_outside)),
    "a weight computed from the rows": ("_independent", Parts(multiply=_multiplied_by_rows)),
    "a collective in between": ("_may_move", Parts(between=_reduced_between)),
    "a write in between": ("_may_move", Parts(between=_written_between)),
}
"""``{what breaks a rule: (the rule in check.py, the seam)}``. Each seam keeps all other rules."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_seam_that_breaks_one_rule_is_not_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the check ignores the rule, the sites' plans have bands. So no other rule refuses the seam."""
    rule, parts = BROKEN[name]
    assert _bands(parts) == [None, None]
    monkeypatch.setattr(check, rule, lambda *arguments: True)
    assert _bands(parts) == [2, 2]


PLANS: dict[str, tuple[Parts, dict[str, Any]]] = {
    "one sub-chunk": (Parts(), {"sub_chunks": 1}),
    "partial sums travel": (Parts(), {"numerics": "allow_hop_rounding"}),
    "the rows are no multiple of the bands": (Parts(tokens=66), {}),
    "looping ops": (Parts(), {"step_node_budget": 1}),
    "symbolic rows": (Parts(dynamic=(0,)), {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_seam_whose_plans_do_not_fit_is_not_cut(name: str) -> None:
    parts, fields = PLANS[name]
    assert _bands(Parts()) == [2, 2] and _bands(parts, **fields) == [None, None]


def test_sites_around_an_op_with_several_results_are_overlapped() -> None:
    """The mean is a result of the graph. The sites are overlapped, but not in bands."""
    with fake_group(2):
        made = HandGraph()
        scattered = made.scatter(made.mm(made.input(64, 32), made.input(32, 64, name="w")))
        both = made.call(aten.var_mean.correction, scattered, [-1], correction=0, keepdim=True)
        rows = made.call(aten.div.Tensor, scattered, made.call(getitem, both, 0))
        result = _multiplied(made, made.gather(rows), scattered)
        report = made.output(result, made.call(getitem, both, 1)).run(sub_chunks=2)
    assert not report.failures and [s.decision.status for s in report.sites] == ["overlapped", "overlapped"]
    assert not any("bands" in s.decision.moving.parameters for s in report.sites)


def _estimates(parts: Parts) -> list[float]:
    """The estimated microseconds of each site's plan."""
    with fake_group(2):
        report = parts.seam().run(mode="report", sub_chunks=2)
    return [s.decision.moving.estimate_us["ring"] for s in report.sites]


def test_a_forced_schedule_shows_what_bands_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second band costs four steps of 100 us: a wait of the scatter, one more own piece, and two launches."""
    banded = _estimates(Parts())
    monkeypatch.setattr(check, "bands_of", lambda seam, counts: [])
    in_turn = _estimates(Parts())
    assert sum(banded) == pytest.approx(sum(in_turn) + 400, abs=20)


@pytest.mark.parametrize(
    "switches", [{"schedule": "auto", "sub_chunks": 4}, {"schedule": "ring", "sub_chunks": "auto"}]
)
def test_estimates_give_both_sites_the_sub_chunks_of_the_fastest_seam(
    switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine ``SLOW``, each transfer takes 28 ms, and the matmuls take 8 and 43 ms. Planned alone, the scatter
    has 2 sub-chunks and the gather has 4. The seam is fastest in 4 bands. A forced ring on a known machine is planned
    as by ``auto``."""

    def wide(made: HandGraph, gathered: fx.Node, scattered: fx.Node) -> fx.Node:
        return made.mm(gathered, made.input(64, 176, name="up"))

    def sub_chunks() -> list[Any]:
        with fake_group(2):
            report = Parts(multiply=wide).seam().run(mode="report", machine=SLOW, **switches)
        plans = [s.decision.moving.parameters for s in report.sites]
        return [(p["sub_chunks"], p.get("bands")) for p in plans]

    assert sub_chunks() == [(4, 4), (4, 4)]
    monkeypatch.setattr(check, "bands_of", lambda seam, counts: [])
    assert sub_chunks() == [(2, None), (4, None)]


def test_a_forced_ring_on_a_known_machine_has_bands_only_where_they_pay() -> None:
    """On the machine ``FAST``, the steps of bands cost more than they hide."""
    assert _bands(Parts(), sub_chunks="auto", machine=FAST) == [None, None]
    assert _bands(Parts(), sub_chunks=2, machine=FAST) == [2, 2]


def test_copies_for_other_readers_count() -> None:
    """A node outside reads rows of the seam, so their bands are joined in a copy. The estimate counts the copy: ``[32,
    64]`` floats are read and written at 2e10 B/s."""

    def read_elsewhere(made: HandGraph, scattered: fx.Node) -> fx.Node:
        positive = _relu(made, scattered)
        made.call(aten.neg.default, positive)
        return positive

    _, plain = _estimates(Parts())
    _, copied = _estimates(Parts(between=read_elsewhere))
    assert copied - plain == pytest.approx(2 * 32 * 64 * 4 / 2e10 * 1e6, abs=0.11)


def test_bands_keep_to_the_budget_of_nodes() -> None:
    """Bands add about 14 nodes. The smaller budget has room for both rings, but not for these nodes."""
    sizes: dict[int, int] = {}
    for budget in (3000, 60):
        with fake_group(2):
            made = Parts(between=_residual_and_norm).seam()
            report = made.run(sub_chunks=2, step_node_budget=budget)
        sizes[budget] = len(made.graph.nodes)
        assert [s.decision.moving.parameters["unrolled"] for s in report.sites] == [True, True]
        assert ["bands" in s.decision.moving.parameters for s in report.sites] == [budget == 3000] * 2
    assert sizes[3000] - sizes[60] == pytest.approx(14, abs=4)


@pytest.mark.parametrize("cause", ["an error", "a step in between"])
def test_a_seam_that_fails_leaves_its_sites_overlapped(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In case ``a step in between``, a copy of the gather's first step is marked as a step of another site."""
    if cause == "an error":
        monkeypatch.setattr(write, "_give_whole", lambda *arguments: 1 / 0)
    else:
        original = write.write

        def with_other(graph: fx.Graph, seam: Any, emitted: list[fx.Node], *rest: Any) -> None:
            start = next(n for n in emitted if n.meta[write.SITE] == seam.gather.facts.id)
            with graph.inserting_after(start):
                other = graph.create_node(start.op, start.target, start.args, start.kwargs)
            other.meta = {**start.meta, write.SITE: "other"}
            original(graph, seam, [*emitted, other], *rest)

        monkeypatch.setattr(rewrite, "write_seam", with_other)
    with fake_group(2):
        report = Parts().seam().run(sub_chunks=2)
    assert [s.decision.status for s in report.sites] == ["overlapped", "overlapped"]
    assert not any("bands" in s.decision.moving.parameters for s in report.sites)
    (failure,) = report.failures
    assert failure.stage == "seam" and failure.sites == [s.facts.id for s in report.sites]
    assert "in bands" in report.notices[0]

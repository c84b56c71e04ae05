# SPDX-License-Identifier: Apache-2.0
"""The choice of the sequence-parallel rewrite. With ``auto``, estimates decide whether the rewrite runs. ``on`` forces
it, and ``off`` turns it off. Mode ``report`` only describes it. A failed rewrite leaves the graph as written."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.utils._sympy.functions import Mod
from torch.utils._sympy.value_ranges import ValueRanges

from overlap_inductor.errors import StrictError
from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import MARGIN_IN_STRETCH
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.passes import sequence_parallel
from overlap_inductor.passes.sequence.write import RowWriter
from overlap_inductor.report import publish
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.target import planning_for
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.sequence_blocks import BLOCKS
from tests.support.sequence_blocks import ReduceBackward
from tests.support.sequence_blocks import ReduceForward
from tests.unit.stretch_reasons import stretch

H200 = BOXES["h200"]
BF16 = torch.bfloat16


def layer(tokens: int, dynamic: bool = False) -> HandGraph:
    """A row-parallel matmul, its all-reduce, a relu and a column-parallel matmul. The relu's result is an output,
    too."""
    made = HandGraph()
    own, hidden, dims = 1024, 8192, [0] if dynamic else []
    x = made.input(tokens, own, dtype=BF16, dynamic=dims)
    w, v = made.input(own, hidden, dtype=BF16, name="w"), made.input(hidden, 2 * own, dtype=BF16, name="v")
    added = made.call(aten.relu.default, made.reduce(made.mm(x, w)))
    return made.output(made.mm(added, v), added)


def has(made: HandGraph, name: str) -> bool:
    return any(name in str(n.target) for n in made.graph.nodes)


def test_auto_rewrites_large_stretches_and_keeps_small_ones() -> None:
    with fake_group(8), planning_for(H200):
        for tokens, status in ((16384, "rewritten"), (8, "kept")):
            made = layer(tokens)
            (facts,) = made.divide(schedule="auto", sequence_parallel="auto")
            assert (facts.status, facts.source) == (status, "analytic"), facts
            assert has(made, "reduce_scatter") == (status == "rewritten") == (not has(made, "all_reduce"))
            pays = facts.estimate_us["keep"] > 1.02 * facts.estimate_us["rewritten"]
            assert pays == (status == "rewritten")


def test_auto_guards_a_symbolic_number_of_tokens_where_the_choice_changes() -> None:
    """One guard compares the number of tokens with a threshold. If a first rough estimate does not rule the rewrite
    out, another guard says whether the ranks divide the tokens evenly. There is no other guard."""
    with fake_group(8), planning_for(H200):
        large, middle, small = (layer(tokens, dynamic=True) for tokens in (16384, 1024, 16))
        (rewritten,), (kept,), (few,) = (
            made.divide(schedule="auto", sequence_parallel="auto") for made in (large, middle, small)
        )
        assert (rewritten.status, kept.status, few.status) == ("rewritten", "kept", "kept")
        (size,) = (n.meta["val"].shape[0].node.expr for n in large.graph.nodes if n.name == "x")
        divides, limit = (guard.expr for guard in large.shapes.guards)
        assert divides == sympy.Eq(Mod(size, 8), 0) and limit == (size >= limit.rhs)
        assert [str(guard.expr)[:3] for guard in middle.shapes.guards] == ["Eq(", str(limit)[:3]]
        assert int(limit.rhs) == int(middle.shapes.guards[1].expr.rhs) > 1024
        (reason,), (upper,) = few.reasons, (guard.expr for guard in small.shapes.guards)
        (size,) = (n.meta["val"].shape[0].node.expr for n in small.graph.nodes if n.name == "x")
        assert upper == (size < upper.rhs) and 16 < int(upper.rhs) <= int(limit.rhs)
        assert reason.code == "few_tokens" and f"{upper.rhs} tokens and more get a graph of their own" in reason.text


def test_no_guard_is_added_if_the_program_states_bounds() -> None:
    """Torch fails a compile whose guards the stated bounds do not imply. The bounds may belong to the local tensor of a
    DTensor (``inner_contexts``)."""
    bounds = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(2, 8192))
    with fake_group(8), planning_for(H200):
        for inner in (False, True):
            for tokens in (16, 16384):
                made = layer(tokens, dynamic=True)
                (x,) = (n.meta["val"] for n in made.graph.nodes if n.name == "x")
                context = SimpleNamespace(constraint_sizes=[bounds, None])
                tracked = SimpleNamespace(fake=x, symbolic_context=context)
                if inner:
                    fake, outer = SimpleNamespace(shape=(), local=x), SimpleNamespace(inner_contexts={"local": context})
                    tracked = SimpleNamespace(fake=fake, symbolic_context=outer)
                made.shapes.tracked_fakes = [tracked]
                (facts,) = made.divide(schedule="auto", sequence_parallel="auto")
                assert facts.status == "kept" and not made.shapes.guards
                if tokens == 16:
                    assert "use this graph, too, because the program states the bounds" in facts.reasons[0].text


def test_a_guard_excludes_numbers_of_tokens_at_which_the_host_is_the_limit() -> None:
    """If the host needs longer than the GPU, no site of the rewritten graph is overlapped, so the rewrite does not pay.
    The graphs for a symbolic number and for the guard's number are rewritten alike."""

    def limit(machine: str | None) -> int:
        made = layer(16384, dynamic=True)
        (facts,) = made.divide(schedule="auto", sequence_parallel="auto", machine=machine)
        assert facts.status == "rewritten"
        return int(made.shapes.guards[1].expr.rhs)

    with fake_group(8), planning_for(H200):
        # The host needs 80 us for 2 matmuls, and 260 us for 2 collectives.
        usual, fast = limit(None), limit('{"launch_seconds": 1e-9, "call_seconds": 1e-9}')
        assert usual > fast
        statuses = [
            layer(n).divide(schedule="auto", sequence_parallel="auto")[0].status for n in (fast, usual // 2, usual)
        ]
        assert statuses == ["kept", "kept", "rewritten"]


def test_auto_rewrites_a_large_symbolic_number_that_the_ranks_do_not_divide() -> None:
    """Its sites are found and estimated like those of multiples. The guards say that it is no multiple."""
    with fake_group(8), planning_for(H200):
        even, odd, small = (layer(tokens, dynamic=True) for tokens in (16384, 16387, 1027))
        (of_even,), (of_odd,), (kept,) = (
            made.divide(schedule="auto", sequence_parallel="auto") for made in (even, odd, small)
        )
        assert (of_odd.status, of_odd.source, kept.status) == ("rewritten", "analytic", "kept")
        assert [r.code for r in kept.reasons] == ["too_small"] and has(odd, "reduce_scatter")
        assert of_odd.estimate_us["rewritten"] == pytest.approx(of_even.estimate_us["rewritten"], rel=0.02)
        (size,) = (n.meta["val"].shape[0].node.expr for n in odd.graph.nodes if n.name == "x")
        divides, limit = (guard.expr for guard in odd.shapes.guards)
        assert divides == sympy.Ne(Mod(size, 8), 0) and limit == (size >= limit.rhs)


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_forced_and_off(mode: str) -> None:
    """``on`` rewrites a stretch even if that does not pay. ``off`` does not even describe the stretch."""
    with fake_group(2):
        forced, off = stretch(8), stretch(8)
        before = off.text()
        (facts,) = forced.divide(mode=mode, sequence_parallel="on")
        assert (facts.status, facts.source) == ("rewritten", "forced") and has(forced, "reduce_scatter")
        assert off.divide(mode=mode, sequence_parallel="off") == [] and off.text() == before


def test_ranks_compare_a_rewritten_graph_that_overlaps_nothing() -> None:
    """A rewritten graph exchanges other data than its plain program, even if no site is overlapped. So ranks must
    compare plans."""
    with fake_group(2):
        made, written = stretch(8), stretch(8)
        made.divide()
        report, other = (g.run(schedule="keep") for g in (made, written))
        assert {s.decision.status for r in (report, other) for s in r.sites} == {"kept"}
        mine, theirs = (ExchangePlan.from_json(r.exchange) for r in (report, other))
        assert mine.overlaps and report.plan_hash == mine.digest != theirs.digest
        assert not theirs.overlaps and not other.plan_hash


def test_report_mode_leaves_the_graph_as_written() -> None:
    with fake_group(2):
        made = stretch(8)
        before = made.text()
        (facts,) = made.divide(mode="report")
        assert (facts.status, [r.code for r in facts.reasons]) == ("kept", ["report_mode"])
        assert set(facts.estimate_us) == {"keep", "rewritten"} and made.text() == before
        assert made.run(mode="report").stretches == [facts]


def test_a_graph_without_all_reduces_is_not_searched_for_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "RowFinder", lambda graph: 1 / 0)
    with fake_group(2):
        made = HandGraph()
        made.output(made.gather(made.input(4, 16)))
        assert made.divide() == []


def _fails_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    original = getattr(RowWriter, point)

    def broken(self: RowWriter, *args: Any) -> Any:
        original(self, *args)
        return 1 / 0

    monkeypatch.setattr(RowWriter, point, broken)


@pytest.mark.parametrize("sequence_parallel", ["on", "auto"])
@pytest.mark.parametrize("point", ["apply", "_scatter", "_gather", "_row_node"])
def test_a_failed_rewrite_leaves_the_graph_as_written(
    point: str, sequence_parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_group(2):
        made = stretch(8)
        before = made.text()
        _fails_at(monkeypatch, point)
        assert made.divide(sequence_parallel=sequence_parallel) == []
        monkeypatch.undo()
        assert made.text() == before
        made.graph.lint()
        report = made.run()
        assert [f.stage for f in report.failures] == ["sequence_parallel"]
        assert "ZeroDivisionError" in report.failures[0].traceback and report.notices[-1] == BUG_REPORT
        assert report.counters()["failed"] == 1 and report.stretches == []
        report.mode = "strict"
        with pytest.raises(StrictError, match="the sequence-parallel rewrite failed .*ZeroDivisionError"):
            publish.activate(report)


def test_a_rewrite_that_fails_at_the_graph_itself_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewrite is applied first to a copy, for the estimate, then to the graph. Here only the second application
    fails."""
    written: list[RowWriter] = []
    original = RowWriter._gather

    def broken(self: RowWriter, *args: Any) -> None:
        written.append(self)
        original(self, *args)
        if self is not written[0]:
            raise ValueError("half way")

    with fake_group(2):
        made = stretch(8)
        before = made.text()
        monkeypatch.setattr(RowWriter, "_gather", broken)
        assert made.divide() == [] and len(written) == 2
        monkeypatch.undo()
        assert made.text() == before
        assert all("val" in n.meta for n in made.graph.nodes if n.op != "output")
        assert [s.decision.status for s in made.run().sites] == ["overlapped"]


def test_a_rewrite_whose_facts_cannot_be_stored_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This step comes after the rewrite of the graph, in which no all-reduce is left."""
    with fake_group(2):
        made = stretch(8)
        before = made.text()
        monkeypatch.setattr(sequence_parallel, "_annotate", lambda *args: 1 / 0)
        assert made.divide() == [] and made.text() == before
        monkeypatch.undo()
        assert [f.stage for f in made.run().failures] == ["sequence_parallel"]


def test_a_failed_search_for_collectives_does_not_fail_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(2):
        made = stretch(8)
        before = made.text()
        monkeypatch.setattr(sequence_parallel, "find_collectives", lambda graph: 1 / 0)
        assert made.divide() == [] and made.text() == before
        monkeypatch.undo()
        assert [f.stage for f in made.run().failures] == ["sequence_parallel"]


def _report(**fields: Any) -> OverlapReport:
    fn, make = BLOCKS["two dims"]
    with fake_group(2), torch.no_grad():
        return report_of(fn, *make(2), **fields)


def test_the_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites name the stretch that they come from. If the rewrite fails, the report holds the failure."""
    report = _report(sequence_parallel="on")
    (facts,) = report.stretches
    assert facts.status == "rewritten" and {s.facts.derived_from for s in report.sites} == {facts.id}
    assert report.counters()["stretches_rewritten"] == 1
    off = _report(sequence_parallel="off")
    assert off.stretches == [] and {s.facts.derived_from for s in off.sites} == {None}
    _fails_at(monkeypatch, "_scatter")
    failed = _report(sequence_parallel="on")
    assert failed.counters()["failed"] == 1 and failed.before == off.before


def _mlps(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        entered = ReduceBackward.apply(F.layer_norm(x, x.shape[-1:]))
        x = x + ReduceForward.apply(F.linear(F.silu(F.linear(entered, up)), down))
    return x


@pytest.mark.parametrize(
    ("link_bytes", "status", "least", "most"), [(1e7, "rewritten", 1, 1.02), (4.2e8, "kept", 0.98, 1)]
)
def test_training_on_cpus_needs_no_margin(link_bytes: float, status: str, least: float, most: float) -> None:
    """The rewrite is chosen although it is estimated to save less than 2 %, but not if it is estimated to cost time."""
    (found,) = _trained(link_bytes)[0].stretches
    assert found.status == status
    assert least < found.estimate_us["keep"] / found.estimate_us["rewritten"] < most


def _trained(link_bytes: float) -> list[OverlapReport]:
    """The reports of the forward and the backward of ``_mlps`` on 2 CPU ranks. ``link_bytes``: the link's rate, B/s."""
    hidden, inner = 256, 352
    machine = json.dumps({"link_bytes": link_bytes, "matmul_flops": {"4": 1e11}})
    with fake_group(2):
        x = torch.randn(1024, hidden, requires_grad=True)
        weights = [torch.randn(s, requires_grad=True) for s in [(inner, hidden), (hidden, inner)] * 4]
        return reports_of(_mlps, x, *weights, schedule="auto", sequence_parallel="auto", machine=machine)


def test_sites_of_a_stretch_need_a_smaller_gain_than_others() -> None:
    """Each site is estimated to gain less than ``cost_model.MARGIN``. All are overlapped, because together they pay.
    Without this, the gathers stay exposed, and the rewrite does not pay."""
    reports = _trained(6e6)
    assert [s.status for s in reports[0].stretches] == ["rewritten"]
    sites = [site for report in reports for site in report.sites]
    assert {site.decision.status for site in sites} == {"overlapped"}
    gains = [p["keep"] / p["ring"] for p in (site.decision.moving.estimate_us for site in sites)]
    assert len(sites) == 14 and all(MARGIN_IN_STRETCH < gain < MARGIN for gain in gains), gains

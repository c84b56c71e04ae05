"""Every reason code: one graph that gives exactly it, and no code without such a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import overlap_inductor.passes
from overlap_inductor.passes import legality
from overlap_inductor.passes import rewriter
from overlap_inductor.passes.rewriter import Rewriter
from overlap_inductor.report import OverlapReport
from overlap_inductor.torch_compat import symmetric
from tests.fake_group import fake_group
from tests.hand_graph import HandGraph
from tests.hand_graph import aten
from tests.hand_graph import c10d
from tests.hand_graph import getitem

Case = Callable[[], OverlapReport]
CASES: dict[str, tuple[str, str, Case]] = {}
WORLD_SIZES = {"world_size_one": 1}


def case(code: str, status: str, name: str = "") -> Callable[[Case], Case]:
    """Register a graph for ``code``; ``status`` is the site's, or ``near_miss``."""

    def register(function: Case) -> Case:
        CASES[f"{code} {name}".strip()] = (code, status, function)
        return function

    return register


def weight(made: HandGraph, k: int = 16, n: int = 8, name: str = "w") -> torch.fx.Node:
    return made.input(k, n, name=name)


def gather_site() -> HandGraph:
    made = HandGraph()
    return made.output(made.mm(made.gather(made.input(4, 16)), weight(made)))


def reduce_site(op: str = "sum") -> HandGraph:
    made = HandGraph()
    return made.output(made.reduce(made.mm(made.input(4, 16), weight(made)), op))


# Checks of legality.py


@case("backend_not_supported", "refused")
def _() -> OverlapReport:
    return gather_site().run(refusal="this is compiled ahead of time")


@case("switched_off", "kept", "pattern")
def _() -> OverlapReport:
    return gather_site().run(patterns=("matmul_all_reduce",))


@case("switched_off", "kept", "schedule")
def _() -> OverlapReport:
    return gather_site().run(schedule="keep")


@case("world_size_one", "kept")
def _() -> OverlapReport:
    return gather_site().run()


@case("reduce_op", "refused")
def _() -> OverlapReport:
    return reduce_site("max").run()


@case("dtype", "refused", "matmul")
def _() -> OverlapReport:
    made = HandGraph()
    x, w = made.input(4, 16, dtype=torch.int32), made.input(16, 8, dtype=torch.int32, name="w")
    return made.output(made.mm(made.gather(x), w)).run()


@case("dtype", "refused", "collective")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16, dtype=torch.int8))
    return made.output(made.mm(made.call(torch.ops.prims.convert_element_type.default, gathered, torch.float32), weight(made))).run()


@case("other_users", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.reduce(y), y).run()


@case("strides", "refused")
def _() -> OverlapReport:
    made = gather_site()
    x = next(iter(made.graph.nodes))
    with made.mode:
        x.meta["val"] = torch.empty(4, 16).to_sparse()
    return made.run()


@case("dynamic_shape", "refused", "unbacked")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.mm(made.gather(made.unbacked_input(16)), weight(made))).run()


@case("not_divisible", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(5, 16), weight(made))
    started = made.graph.call_function(c10d.reduce_scatter_tensor.default, (y, "sum", 2, made.group))
    with made.mode:
        started.meta["val"] = torch.empty(2, 8)
    return made.output(made.wait(started)).run()


@case("shares_nodes", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.gather(made.input(4, 16)), weight(made))
    return made.output(made.scatter(y)).run()


@case("stream_boundary", "refused")
def _() -> OverlapReport:
    made = gather_site()
    next(n for n in made.graph.nodes if n.target is aten.mm.default).meta["custom"] = {"stream": 1}
    return made.run()


@case("mutation", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    x, w, other = made.input(4, 16), weight(made), weight(made, name="other")
    gathered = made.gather(x)
    made.call(aten.copy_.default, w, other)
    return made.output(made.mm(gathered, w)).run()


@case("hoist", "refused", "over a collective")
def _() -> OverlapReport:
    """One result is wanted before, another matmul's weight is known only after, the all-reduce."""
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    early = made.call(aten.relu.default, made.mm(gathered, weight(made, name="v")))
    w = made.reduce(weight(made))
    return made.output(early, made.mm(gathered, w)).run()


@case("hoist", "refused", "over an accepted site")
def _() -> OverlapReport:
    """The first site sinks below the second gather, whose matmul needs its result."""
    made = HandGraph()
    first = made.gather(made.input(4, 16))
    w = made.reduce(weight(made))
    second = made.gather(made.input(4, 8, name="y"))
    return made.output(made.mm(second, made.mm(first, w))).run()


@case("hoist", "refused", "of an accepted site")
def _() -> OverlapReport:
    """The first site is written where its first result is wanted and needs the second's there, which must wait longer."""
    made = HandGraph()
    first = made.gather(made.input(4, 8))
    second = made.gather(made.input(4, 16, name="y"))
    w = made.reduce(weight(made))
    early = made.call(aten.relu.default, made.mm(first, weight(made, 8, 4, name="v")))
    late = made.mm(second, w)
    return made.output(early, made.mm(first, late)).run()


# Collectives that can be no site


@case("taken_by_async_tp", "near_miss")
def _() -> OverlapReport:
    import torch.distributed._symmetric_memory  # noqa: F401  (defines the operator)

    made = HandGraph()
    x, w = made.input(4, 16), weight(made)
    fused = made.graph.call_function(torch.ops.symm_mem.fused_all_gather_matmul.default, (x, [w], 0, made.group))
    with made.mode:
        fused.meta["val"] = (torch.empty(8, 16), [torch.empty(8, 8)])
    results = made.call(getitem, fused, 1)
    return made.output(made.call(getitem, results, 0)).run()


@case("out_variant", "near_miss", "in place")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.wait(made.call(c10d.all_reduce_.default, y, "sum", made.group))).run()


@case("out_variant", "near_miss", "out")
def _() -> OverlapReport:
    made = HandGraph()
    x, w, buffer = made.input(4, 16), weight(made), made.input(8, 16, name="buffer")
    gathered = made.wait(made.call(c10d.all_gather_into_tensor_out.default, x, 2, made.group, out=buffer))
    return made.output(made.mm(gathered, w)).run()


@case("coalesced", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    started = made.call(c10d.all_reduce_coalesced.default, [made.mm(made.input(4, 16), weight(made))], "sum", made.group)
    return made.output(made.wait(made.call(getitem, started, 0))).run()


@case("no_wait", "near_miss", "none")
def _() -> OverlapReport:
    made = HandGraph()
    started = made.call(c10d.all_gather_into_tensor.default, made.input(4, 16), 2, made.group)
    return made.output(made.mm(started, weight(made))).run()


@case("no_wait", "near_miss", "two")
def _() -> OverlapReport:
    made = HandGraph()
    started = made.call(c10d.all_reduce.default, made.mm(made.input(4, 16), weight(made)), "sum", made.group)
    return made.output(made.wait(started), made.wait(started)).run()


@case("group_not_resolved", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    made.group = "no such group"
    y = made.mm(made.input(4, 16), weight(made))
    started = made.graph.call_function(c10d.all_reduce.default, (y, "sum", made.group))
    started.meta["val"] = y.meta["val"]
    return made.output(made.wait(started)).run()


@case("pattern_not_available", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.wait(made.call(c10d.all_to_all_single.default, y, [2, 2], [2, 2], made.group))).run()


# Gathers that lead to no site


@case("no_matmul", "near_miss", "gather")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.gather(made.input(4, 16))).run()


@case("no_matmul", "near_miss", "of a scalar")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input()
    started = made.graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, made.group))
    with made.mode:
        started.meta["val"] = torch.empty(2)
    return made.output(made.wait(started)).run()


@case("no_matmul", "near_miss", "reduction")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.reduce(made.input(4, 16))).run()


@case("fsdp_weight_gather", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(4, 16)
    return made.output(made.mm(x, made.gather(made.input(8, 8, name="shard")))).run()


@case("not_plain_gather", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(2, 4, 16)
    joined = made.join(made.gather(x), 2, 1, (1, 0))
    return made.output(made.mm(made.view(joined, 16, 16), weight(made))).run()


@case("op_between", "near_miss", "gather")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    return made.output(made.mm(made.call(aten._softmax.default, gathered, 0, False), weight(made))).run()


@case("op_between", "near_miss", "gather, in parts")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    powers = made.call(aten.exp.default, made.call(aten.sub.Tensor, gathered, made.call(aten.amax.default, gathered, [1], True)))
    shares = made.call(aten.div.Tensor, powers, made.call(aten.sum.dim_IntList, powers, [1], True))
    return made.output(made.mm(shares, weight(made))).run()


@case("op_between", "near_miss", "gathered tensor and a tensor that is not sharded alike")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    return made.output(made.mm(made.call(aten.mul.Tensor, gathered, made.input(8, 1, name="other")), weight(made))).run()


@case("weight_depends_on_collective", "near_miss", "computed")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    square = made.call(aten.relu.default, made.call(aten.cumsum.default, made.call(aten.permute.default, gathered, [1, 0]), 0))
    return made.output(made.mm(gathered, square)).run()


@case("weight_depends_on_collective", "near_miss", "both operands")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    return made.output(made.mm(gathered, made.call(aten.permute.default, gathered, [1, 0]))).run()


@case("matmul_form", "near_miss", "gather")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    return made.output(made.call(aten.addmm.default, made.input(8, name="b"), gathered, weight(made), beta=2)).run()


@case("matmul_form", "near_miss", "reduction")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.call(aten.addmm.default, made.input(8, name="b"), made.input(4, 16), weight(made), alpha=2)
    return made.output(made.reduce(y)).run()


@case("split_contraction", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    cut = made.call(aten.slice.Tensor, made.gather(made.input(4, 16)), 0, 0, 7)
    return made.output(made.mm(made.input(5, 7, name="left"), cut), made.input(1, name="unused")).run()


@case("layout", "near_miss", "gather")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(2, 4, 16))
    return made.output(made.call(aten.bmm.default, gathered, made.input(4, 16, 8, name="w"))).run()


@case("layout", "near_miss", "reduction")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.reduce(made.call(aten.mul.Tensor, y, made.input(4, 1, name="per_row")))).run()


@case("op_between", "near_miss", "reduction")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.reduce(made.call(aten._softmax.default, y, 0, False))).run()


@case("op_between", "near_miss", "reduction, in parts")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.scatter(made.call(aten.sub.Tensor, y, made.call(aten.amax.default, y, [0], True)))).run()


@case("not_plain_scatter", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.view(made.mm(made.input(8, 16), weight(made)), 2, 4, 8)
    pieces = made.call(aten.split.Tensor, y, 2, 1)
    joined = made.call(aten.cat.default, [made.call(getitem, pieces, 1), made.call(getitem, pieces, 0)])
    return made.output(made.scatter(joined)).run()


# The plan and the rewrite


@case("too_small", "kept")
def _() -> OverlapReport:
    return gather_site().run(schedule="auto")


@case("dynamic_shape", "kept", "no op can choose at run time")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(8, 2**13, 1024, dynamic=[1])
    gathered = made.gather(x)
    tokens = gathered.meta["val"].shape[1]
    flat = made.view(made.call(aten.permute.default, gathered, [1, 0, 2]), tokens * 16, 1024)
    return made.output(made.mm(flat, weight(made, 1024, 64))).run(schedule="auto")


@case("too_many_steps", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    joined = made.gather_on(made.input(4, 8), 1)
    return made.output(made.mm(joined, weight(made))).run(step_node_budget=1)


def bf16_site(made: HandGraph) -> HandGraph:
    gathered = made.gather(made.input(8, 16, dtype=torch.bfloat16))
    return made.output(made.mm(gathered, made.input(16, 8, name="w", dtype=torch.bfloat16)))


@case("schedule_not_available", "refused", "no GPUs")
def _() -> OverlapReport:
    return bf16_site(HandGraph()).run(schedule="fused")


@case("schedule_not_available", "refused", "the ring over a transport that is not its own")
def _() -> OverlapReport:
    return gather_site().run(transport="sm_push")


@case("workspace", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(2**12, 128, dtype=torch.bfloat16))
    made.output(made.mm(gathered, made.input(128, 8, name="w", dtype=torch.bfloat16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)
        return made.run(schedule="fused", workspace_limit=1)


@case("report_mode", "kept")
def _() -> OverlapReport:
    return gather_site().run(mode="report")


@case("rewrite_failed", "failed")
def _() -> OverlapReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewriter, "_chain_kept_collectives", lambda self: 1 / 0)
        return gather_site().run()


@pytest.mark.parametrize("name", CASES)
def test_reason(name: str) -> None:
    """A check that no longer fires, fires for another reason, or lets the graph be changed all the same."""
    code, status, function = CASES[name]
    with fake_group(WORLD_SIZES.get(code, 2)):
        report = function()
    if status == "near_miss":
        assert [m.reason.code for m in report.near_misses] == [code] and report.sites == []
        reasons = [m.reason for m in report.near_misses]
    else:
        site = report.sites[-1]
        assert (site.decision.status, [r.code for r in site.decision.reasons]) == (status, [code])
        reasons = site.decision.reasons
    assert all(r.text for r in reasons)
    if all(s.decision.status != "overlapped" for s in report.sites):
        assert report.before == report.after


def test_every_code_has_a_case() -> None:
    """A new reason code without a test, or a code that users look up and that no longer exists."""
    folder = Path(overlap_inductor.passes.__file__).parent
    sources = "".join(p.read_text() for p in folder.glob("*.py"))
    written = set(re.findall(r'Reason\(\s*"(\w+)"', sources)) | {code for code, _ in legality.CHECKS}
    assert written == {code for code, _, _ in CASES.values()}


def test_the_first_check_that_speaks_gives_the_reason() -> None:
    """The order of the checks is part of the contract: what a user asked for comes before what the site is."""
    with fake_group(2):
        (site,) = reduce_site("max").run(patterns=("all_gather_matmul",)).sites
    assert [r.code for r in site.decision.reasons] == ["switched_off"]


@pytest.mark.parametrize("point", ["apply", "placing", "half way", "order", "lint"])
def test_failed_rewrite_restores_the_graph(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph left half rewritten, values without meta, or another site marked as overlapped."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16)), weight(made))
        result = made.reduce(made.mm(made.input(4, 16, name="z"), weight(made, name="v")))
        made.output(y, result)
        before = made.text()
        if point == "apply":
            monkeypatch.setattr(Rewriter, "apply", lambda self, sites: 1 / 0)
        elif point == "placing":
            monkeypatch.setattr(rewriter, "place", lambda nodes: 1 / 0)
        elif point == "half way":
            original = Rewriter._site
            monkeypatch.setattr(Rewriter, "_site", lambda self, s, a: 1 / 0 if self.emitted else original(self, s, a))
        elif point == "order":
            monkeypatch.setattr(Rewriter, "apply", lambda self, sites: (sites[0].matmuls[0].lhs.append(sites[0].matmuls[0].lhs.args[0]), 1 / 0))
        else:
            monkeypatch.setattr(torch.fx.Graph, "lint", lambda self: 1 / 0)
        report = made.run()
        monkeypatch.undo()
        assert report.before == before
        failed = [(s.decision.status, s.decision.reasons[0].code) for s in report.sites if s.decision.status == "failed"]
        if point == "placing":
            # Only the gather is placed; the all-reduce is rewritten all the same.
            assert failed == [("failed", "rewrite_failed")] and report.sites[1].decision.status == "overlapped"
            return
        if point == "half way":
            # Only the second site fails; the first is rewritten all the same.
            assert failed == [("failed", "rewrite_failed")] and report.sites[0].decision.status == "overlapped"
            assert report.after.count("all_reduce_default") > 1 and "gather_step" in report.after
            return
        assert made.text() == before == report.after
        assert failed == [("failed", "rewrite_failed")] * 2
        assert "ZeroDivisionError" in report.notices[0]
        assert all("val" in n.meta for n in made.graph.nodes if n.op != "output")
        made.graph.lint()
        assert [s.decision.status for s in made.run().sites] == ["overlapped"] * 2


def test_not_a_failure() -> None:
    """Strict mode raises for refused sites: what the user switched off, or what moves nothing, must not be one."""
    statuses = {code: status for code, status, _ in CASES.values()}
    assert {c for c, s in statuses.items() if s == "kept"} >= {"switched_off", "world_size_one", "too_small", "report_mode"}

"""Graphs around a site: who else uses what it reads and writes, what stands between, what stays in place and in which order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap_inductor import OverlapConfig
from overlap_inductor.passes.overlap_pass import run_overlap_pass
from overlap_inductor.report import OverlapReport
from tests.fake_group import all_gather
from tests.fake_group import all_reduce
from tests.fake_group import fake_group
from tests.fake_group import reduce_scatter
from tests.fake_group import report_of
from tests.fake_group import reports_of
from tests.hand_graph import HandGraph
from tests.hand_graph import aten
from tests.hand_graph import c10d


def facts(report: OverlapReport) -> list[tuple[str, list[str], str]]:
    return [(s.facts.pattern, [f"{m.kind} {m.role}" for m in s.facts.matmuls], s.decision.status) for s in report.sites]


def codes(report: OverlapReport) -> list[str]:
    return [m.reason.code for m in report.near_misses]


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], world_size: int = 2, **fields: Any) -> OverlapReport:
    with fake_group(world_size), torch.no_grad():
        return report_of(fn, *[torch.randn(s) for s in shapes], **fields)


def world() -> Any:
    return dist.group.WORLD


# What the gathered tensor feeds


def test_one_gather_feeds_matmuls_of_every_kind() -> None:
    """Consumers of other kinds and roles dropped from the site: their operand would be gathered twice, or after the ring."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 16)
        weights = made.input(16, 8, name="w"), made.input(6, 8, name="left"), made.input(8, name="bias"), made.input(5, 16, name="rows")
        gathered = made.gather(x)
        made.output(
            made.mm(gathered, weights[0]),
            made.call(aten.addmm.default, weights[2], gathered, weights[0]),
            made.mm(weights[1], gathered),
            made.mm(weights[3], made.call(aten.permute.default, gathered, [1, 0])),
            made.call(aten.bmm.default, made.view(gathered, 1, 8, 16), made.view(weights[0], 1, 16, 8)),
        )
        report = made.run()
    (site,) = report.sites
    assert facts(report) == [("all_gather_matmul", ["mm M", "addmm M", "mm K", "mm N", "bmm M"], "overlapped")]
    assert report.after.count("overlap_inductor.gather_start.default(") == 1


@pytest.mark.parametrize(
    ("role", "left", "dim"), [("M", (), 0), ("K", (), 1), ("K", (6, 8), 0), ("N", (6, 4), 1)], ids=["left M", "left K", "right K", "right N"]
)
def test_gathered_on_either_side(role: str, left: tuple[int, ...], dim: int) -> None:
    """A role mixed up writes pieces into the wrong rows, or does not add what must be added."""
    with fake_group(2):
        made = HandGraph()
        x = made.call(aten.relu.default, made.input(4, 16))
        gathered = made.gather_on(x, dim) if dim else made.gather(x)
        k = gathered.meta["val"].shape[1]
        report = made.output(made.mm(made.input(*left, name="l"), gathered) if left else made.mm(gathered, made.input(k, 8, name="w"))).run()
    assert facts(report) == [("all_gather_matmul", [f"mm {role}"], "overlapped")]
    assert ("assemble" in report.after) is (role != "K")
    if role == "K":
        assert re.search(r"aten\.(addmm|add)\.", report.after)


def test_gathered_tensor_is_used_elsewhere_too() -> None:
    """The other user must read the ring's own buffer after the last hop, not a second all-gather."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x, 0, world())
        return gathered @ w, gathered.sum(), gathered

    report = traced(fn, (4, 16), (16, 8))
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")]
    lines = report.after.splitlines()
    last_hop = max(i for i, line in enumerate(lines) if "gather_step" in line)
    reader = next(i for i, line in enumerate(lines) if "aten.sum" in line)
    assert "all_gather_into_tensor" not in report.after and "gather_start_default" in lines[reader] and reader > last_hop
    assert "gather_start_default" in lines[-1]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", 0, world())


def test_gathered_tensor_saved_for_backward() -> None:
    """wgrad needs the gathered activation: saving it must neither stop the site nor keep the collective."""
    with fake_group(2):
        x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
        forward, backward = reports_of(lambda x, w: (Gather.apply(x).relu() @ w).relu(), x, w)
    assert facts(forward) == [("all_gather_matmul", ["mm M"], "overlapped")]
    assert "_c10d_functional" not in forward.after
    assert ("matmul_reduce_scatter", ["mm M"], "overlapped") in facts(backward)


def test_input_of_the_collective_is_an_output() -> None:
    """The local tensor is wanted too: after a gather that is no obstacle, before a reduction it is one."""
    gather = traced(lambda x, w: ((y := x.relu()), all_gather(y, 0, world()) @ w), (4, 16), (16, 8))
    assert facts(gather) == [("all_gather_matmul", ["mm M"], "overlapped")]
    reduction = traced(lambda x, w: ((y := x @ w), all_reduce(y, "sum", world())), (4, 16), (16, 8))
    assert facts(reduction) == [("matmul_all_reduce", ["mm M"], "refused")]
    assert [r.code for r in reduction.sites[0].decision.reasons] == ["other_users"] and reduction.before == reduction.after


# Sums


def test_sum_of_matmuls_into_one_scatter() -> None:
    """Every term must be cut; a term left whole is added to a slice of another."""
    with fake_group(2):
        made = HandGraph()
        x, y = made.input(4, 16), made.input(4, 32, name="y")
        terms = made.mm(x, made.input(16, 8, name="w")), made.mm(y, made.input(32, 8, name="v"))
        report = made.output(made.scatter(made.call(aten.add.Tensor, *terms))).run(sub_chunks=1)
    assert facts(report) == [("matmul_reduce_scatter", ["mm M", "mm M"], "overlapped")]
    assert len(re.findall(r"float32\[2, 8\] = aten\.mm", report.after)) == 4


def test_two_all_reduces_added_are_one() -> None:
    """Linearity: the sum is reduced once. Where a term is used elsewhere it must not be."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "sum", world())

    report = traced(fn, (4, 16), (16, 8), (16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M", "mm M"], "overlapped")]

    def three(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ w, "sum", world()) + (all_reduce(x @ v, "sum", world()) + all_reduce(x @ (w + v), "sum", world()))

    assert facts(traced(three, (4, 16), (16, 8), (16, 8))) == [("matmul_all_reduce", ["mm M", "mm M", "mm M"], "overlapped")]

    def partly(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "sum", world()) + all_reduce(torch.softmax(x @ (w * v), 0), "sum", world())

    report = traced(partly, (4, 16), (16, 8), (16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M", "mm M"], "overlapped")] and codes(report) == ["op_between"]

    def used(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = all_reduce(x @ w, "sum", world())
        return left + all_reduce(x @ v, "sum", world()), left.relu()

    assert [f[0] for f in facts(traced(used, (4, 16), (16, 8), (16, 8)))] == ["matmul_all_reduce"] * 2


def test_all_reduces_of_other_kinds_are_not_merged() -> None:
    """A sum and an average added to each other are two reductions."""
    report = traced(
        lambda x, w, v: all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "avg", world()), (4, 16), (16, 8), (16, 8)
    )
    assert [f[0] for f in facts(report)] == ["matmul_all_reduce"] * 2


# The head


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_head(dim: int) -> None:
    """A matmul's output is gathered: logits on the vocabulary dim."""
    report = traced(lambda x, w: all_gather(x @ w, dim, world()), (4, 16), (16, 8))
    assert facts(report) == [("matmul_all_gather", ["mm M"], "overlapped")]


def test_sharded_head_whatever_uses_the_logits() -> None:
    """A matmul behind an op that does not commute made the finder give up before it looked at the producer."""
    report = traced(lambda x, w, v: torch.cumsum(all_gather(x @ w, 0, world()), 0) @ v, (4, 16), (16, 8), (8, 4))
    assert facts(report) == [("matmul_all_gather", ["mm M"], "overlapped")] and report.near_misses == []


# What stands between


def test_what_commutes_is_taken_after_a_gather() -> None:
    """Cast, scale and activation are applied to each piece; refusing them loses most real sites."""
    report = traced(lambda x, w, s: (all_gather(x, 0, world()) * s).relu().double() @ w.double(), (4, 16), (16, 8), (1,))
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")]
    assert report.after.count("aten.relu.default(") == report.after.count("gather_step.default(") + 1


def test_what_commutes_is_taken_before_a_reduction() -> None:
    """Bias of a column, scale, activation and cast."""
    report = traced(lambda x, w, b: all_reduce(((x @ w + b) * 3).relu().double(), "sum", world()), (4, 16), (16, 8), (8,))
    assert facts(report) == [("matmul_all_reduce", ["addmm M"], "overlapped")] and report.near_misses == []


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_between_is_refused(dim: int) -> None:
    """A softmax over rows of other ranks, computed piece by piece, is wrong; in the report it must not be 'no matmul'."""
    after = traced(lambda x, w: torch.softmax(all_gather(x, 0, world()), dim) @ w, (4, 16), (16, 8))
    before = traced(lambda x, w: all_reduce(torch.softmax(x @ w, dim), "sum", world()), (4, 16), (16, 8))
    for report in (after, before):
        assert facts(report) == [] and codes(report) == ["op_between"]
        assert report.before == report.after


def test_collective_alone() -> None:
    """Nothing to hide behind: reported as such, and left in place."""
    report = traced(lambda x: all_reduce(x, "sum", world()) * 2, (4, 16))
    assert facts(report) == [] and codes(report) == ["no_matmul"] and report.before == report.after


def test_weight_gather_is_left_to_bucketing() -> None:
    """FSDP's gathers belong to Inductor's bucketing; a ring for each would be slower. Casts do not hide them."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() @ all_gather(w.bfloat16(), 0, world())

    report = traced(fn, (4, 16), (8, 8))
    assert facts(report) == [] and codes(report) == ["fsdp_weight_gather"]


def test_operand_behind_another_collective() -> None:
    """Full activation checkpointing: the gathered gradient comes first, what the weight's gradient needs is recomputed, and only then
    are both results used. Refusing it loses a third of the backward sites."""
    with fake_group(2):
        made = HandGraph()
        gradient = made.gather(made.input(4, 16, name="g"))
        data = made.mm(gradient, made.input(16, 8, name="w"))
        again = made.mm(made.gather(made.input(4, 6, name="x")), made.input(6, 8, name="v"))
        weights = made.mm(made.call(aten.permute.default, gradient, [1, 0]), made.call(aten.relu.default, again))
        report = made.output(made.call(aten.mul.Tensor, data, again), weights).run(sub_chunks=1)
    assert facts(report) == [("all_gather_matmul", ["mm M", "mm K"], "overlapped"), ("all_gather_matmul", ["mm M"], "overlapped")]
    starts = [m.start() for m in re.finditer(r"gather_start\.default\([^)]*", report.after)]
    assert ", x," in report.after[starts[0] :].splitlines()[0] and len(starts) == 2


# Sites that read each other, and what they leave behind


def reach(made: HandGraph) -> None:
    """Every matmul and collective of the graph leads to its output, or to something that is sent."""
    wanted, pending = set(), [n for n in made.graph.nodes if n.op == "output" or "exchange_" in str(n.target)]
    while pending:
        node = pending.pop()
        if node not in wanted:
            wanted.add(node)
            pending += node.all_input_nodes
    dead = [n.name for n in made.graph.nodes if n.op == "call_function" and str(n.target).startswith(("aten.", "_c10d")) and n not in wanted]
    assert dead == [], f"computed for nothing: {dead}"


def test_a_site_that_feeds_another() -> None:
    """Sequence-parallel MLP: the second site must read the first one's chunks, not a whole matmul that nobody hides anything behind."""
    with fake_group(2):
        made = HandGraph()
        first = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        second = made.mm(made.call(aten.relu.default, first), made.input(8, 16, name="v"))
        report = made.output(made.scatter(second)).run(sub_chunks=1)
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] * 2 and report.notices == []
    assert not re.search(r"mm\.default\(gather_start", report.after) and "_c10d_functional" not in report.after
    assert len(re.findall(r" aten\.mm\.default", report.after)) == 4


@pytest.mark.parametrize("kind", ["operand", "external", "weight"])
def test_a_site_that_reads_a_reduced_tensor(kind: str) -> None:
    """The first site's result is an operand, a summand or the weight of the second: its wait is gone by then."""
    with fake_group(2):
        made = HandGraph()
        reduced = made.reduce(made.mm(made.input(4, 16), made.input(16, 16, name="w")))
        other, weight = made.input(4, 16, name="y"), made.input(16, 16, name="v")
        if kind == "operand":
            made.output(made.reduce(made.mm(reduced, weight)))
        elif kind == "external":
            made.output(made.reduce(made.call(aten.add.Tensor, made.mm(other, weight), reduced)))
        else:
            made.output(made.mm(made.gather(other), made.call(aten.permute.default, reduced, [1, 0])))
        report = made.run()
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] * 2 and report.notices == []


def test_merged_all_reduces_leave_nothing_behind() -> None:
    """The old sum kept the waits, the waits their all-reduces, those the whole matmuls: twice the work and the traffic."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 16)
        terms = [made.reduce(made.mm(x, made.input(16, 8, name=name))) for name in "uvw"]
        total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, terms[0], terms[1]), terms[2])
        report = made.output(made.call(aten.relu.default, total)).run(sub_chunks=1)
        reach(made)
    assert facts(report) == [("matmul_all_reduce", ["mm M"] * 3, "overlapped")]
    assert "_c10d_functional" not in report.after and not re.search(r"\[4, 8\] = aten\.mm", report.after)


def test_vector_along_another_dim() -> None:
    """A vector added behind a permute or a view lies along the matmul's rows or parts of its columns: added along the columns it is wrong."""
    with fake_group(2):
        made = HandGraph()
        y = made.call(aten.permute.default, made.mm(made.input(8, 4), made.input(4, 8, name="w")), [1, 0])
        permuted = made.output(made.reduce(made.call(aten.add.Tensor, y, made.input(8, name="b")))).run()
        made = HandGraph()
        y = made.view(made.mm(made.input(8, 4), made.input(4, 6, name="w")), 8, 2, 3)
        heads = made.output(made.scatter(made.call(aten.mul.Tensor, y, made.input(3, name="b")))).run()
    for report in (permuted, heads):
        assert facts(report) == [] and codes(report) == ["layout"] and report.before == report.after and report.notices == []


def test_a_scale_of_rank_one_keeps_its_promotion() -> None:
    """bf16 times fp32[1] is fp32: pieces of another dtype than the collective's are half the bytes that the peer expects."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(4, 16, dtype=torch.bfloat16), made.input(16, 8, dtype=torch.bfloat16, name="w"))
        report = made.output(made.scatter(made.call(aten.mul.Tensor, y, made.input(1, name="s")))).run(sub_chunks=1)
    assert [f[2] for f in facts(report)] == ["overlapped"]
    sent = re.search(r"exchange_send\.default\(\w+, \w+, (\w+),", report.after)
    assert sent is not None and f"{sent[1]}: float32" in report.after


def test_written_in_place_between_site_and_epilogue() -> None:
    """The bias is overwritten after the matmul and before it is added: an epilogue moved up would read the old one."""
    with fake_group(2):
        made = HandGraph()
        bias, newer = made.input(8, name="b"), made.input(8, name="n")
        y = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        made.call(aten.copy_.default, bias, newer)
        report = made.output(made.mm(made.call(aten.add.Tensor, y, bias), made.input(8, 4, name="v"))).run()
    assert [r.code for r in report.sites[0].decision.reasons] == ["mutation"] and report.before == report.after


def test_scale_computed_from_what_is_gathered() -> None:
    """A dynamic scale needs the whole gathered tensor before the first chunk."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        largest = made.call(aten.amax.default, made.call(aten.abs.default, gathered), [0, 1], True)
        report = made.output(made.mm(made.call(aten.div.Tensor, gathered, largest), made.input(16, 8, name="w"))).run()
    assert facts(report) == [] and codes(report) == ["weight_depends_on_collective"] and report.before == report.after


def test_size_of_the_result_is_used_behind_it() -> None:
    """A symbolic size read off the matmul's output and used in its epilogue: computed before the matmul there is."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16, dynamic=(0,))), made.input(16, 8, name="w"))
        rows = made.call(aten.sym_size.int, y, 0)
        report = made.output(made.mm(made.call(aten.div.Tensor, y, rows), made.input(8, 4, name="v"))).run(sub_chunks=1)
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] and report.notices == []


def test_dynamic_gated_mlp_of_a_sequence() -> None:
    """Sizes read off the gathered tensor for its views are not needed by the pieces, and need not be moved."""

    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x, 1, world())
        g, u = gathered @ gate, gathered @ up
        return g, u.double(), torch.nn.functional.gelu(g) * u

    with fake_group(4), torch.no_grad():
        x = torch.randn(2, 48, 8)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        report = report_of(mlp, x, torch.randn(8, 5), torch.randn(8, 5))
    assert facts(report) == [("all_gather_matmul", ["mm M", "mm M"], "overlapped")] and report.notices == []


def test_broadcast_that_changes_the_rank_is_not_followed() -> None:
    """A tensor of more dims in a pointwise op gives a result of more dims; a layout of fewer crashed the finder, and with it the compile."""
    with fake_group(2):
        made = HandGraph()
        scaled = made.call(aten.mul.Tensor, made.gather(made.input(4, 8)), made.input(1, 1, 1, name="s"))
        made.output(made.call(aten.bmm.default, made.call(aten.permute.default, scaled, [0, 2, 1]), made.input(1, 8, 4, name="w")))
        report = made.run()
    assert facts(report) == [] and report.notices == []


def test_a_failing_pass_is_no_failing_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while looking: the graph stays, the report says so, and only strict mode raises."""
    from overlap_inductor.errors import StrictError
    from overlap_inductor.passes.finder import SiteFinder

    monkeypatch.setattr(SiteFinder, "run", lambda self: 1 / 0)
    with fake_group(2):
        made = HandGraph()
        made.output(made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w")))
        before = made.text()
        report = made.run()
        assert made.text() == before and report.sites == [] and "ZeroDivisionError" in report.notices[0]
        with pytest.raises(StrictError, match="ZeroDivisionError"):
            made.run(mode="strict")


# Groups and order


def test_other_groups_are_left_alone_and_in_order() -> None:
    """2-D mesh: the tensor-parallel group is overlapped; the data-parallel collectives keep their number, group and order."""
    with fake_group(8, 3), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        tp, dp = mesh.get_group("tp"), mesh.get_group("dp")

        def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = all_reduce(g, "sum", dp)
            y = all_reduce(x @ w, "sum", tp)
            return first, y, all_gather(h, 0, dp)

        report = report_of(fn, torch.randn(8, 16), torch.randn(16, 8), torch.randn(3), torch.randn(5))
        names = tp.group_name, dp.group_name
    (site,) = report.sites
    assert site.facts.collective.group_name == names[0] and site.facts.collective.ranks == (0, 1, 2, 3)
    assert site.facts.collective.mesh_dim == "tp"
    assert [(m.collective.group_name, m.reason.code) for m in report.near_misses] == [(names[1], "no_matmul")] * 2

    def kept(text: str) -> list[str]:
        return re.findall(r"_c10d_functional\.(\w+)\.default\(.*'" + re.escape(names[1]) + "'", text)

    assert kept(report.before) == kept(report.after) == ["all_reduce", "all_gather_into_tensor"]
    assert "overlap_inductor.follow" not in report.after
    assert set(re.findall(r"overlap_inductor\.agree\.default\('(\w+)'", report.after)) == {names[0]}


def test_every_rank_of_a_mesh_has_the_text_of_its_group() -> None:
    """Ranks of one sub-group must agree on the graph; only the group's name may differ between sub-groups."""
    texts: dict[int, set[str]] = {0: set(), 1: set()}
    for rank in (0, 3, 4, 7):
        with fake_group(8, rank), torch.no_grad():
            group = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).get_group("tp")
            report = report_of(lambda x, w, group=group: all_gather(x, 0, group) @ w, torch.randn(4, 16), torch.randn(16, 8))
            assert [s.decision.status for s in report.sites] == ["overlapped"]
            texts[rank // 4].add(report.after)
    assert len(texts[0]) == len(texts[1]) == 1


def test_kept_collectives_of_the_group_are_chained() -> None:
    """Rank order: a collective left in place must not be moved across the ring's steps by Inductor's scheduler."""
    with fake_group(2):
        made = HandGraph()
        x, w, g, h = made.input(4, 16), made.input(16, 8, name="w"), made.input(3, name="g"), made.input(3, name="h")
        early = made.reduce(g)
        y = made.mm(made.gather(x), w)
        late = made.reduce(h)
        report = made.output(early, y, late).run(sub_chunks=1)
    assert [f[2] for f in facts(report)] == ["overlapped"] and codes(report) == ["no_matmul"] * 2
    lines = report.after.splitlines()
    (follow,) = [line for line in lines if "overlap_inductor.follow.default" in line]
    assert "all_reduce_default" in follow
    assert lines.index(follow) < next(i for i, line in enumerate(lines) if "gather_start.default" in line)
    late_line = next(line for line in lines if line.startswith("all_reduce_default_1"))
    assert "control_deps" in late_line and "gather_step_default" in late_line


def test_a_kept_collective_after_a_looping_op() -> None:
    """A looping op returns several values; without an edge from one of them what follows may overtake it on some rank."""
    with fake_group(1024):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        report = made.output(y, made.reduce(made.input(3, name="h"))).run()
    assert "overlap_inductor.all_gather_matmul.default" in report.after
    (line,) = [line for line in report.after.splitlines() if line.startswith("all_reduce_default")]
    assert "control_deps" in line and "getitem" in line


def test_every_group_agrees_before_any_data_moves() -> None:
    """Two groups in one graph: the second group's ranks must not find out that they differ when the first has begun."""
    with fake_group(8, 3), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
        fn = lambda x, w, v: all_reduce(all_reduce(x @ w, "sum", tp).relu() @ v, "sum", dp)  # noqa: E731
        report = report_of(fn, torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 8))
    lines = report.after.splitlines()
    agreed = [i for i, line in enumerate(lines) if ".agree.default" in line]
    assert len(agreed) == 2 and max(agreed) < next(i for i, line in enumerate(lines) if "exchange_start" in line)
    assert sum(".follow.default" in line for line in lines) == 2


def test_sites_of_one_group_share_one_chain() -> None:
    """One agreement a group and graph; every communicating op takes part in one order."""
    report = traced(
        lambda x, w, v: reduce_scatter((all_gather(x, 0, world()) @ w).relu() @ v, "sum", 0, world()), (4, 16), (16, 8), (8, 16), sub_chunks=1
    )
    assert [f[::2] for f in facts(report)] == [("all_gather_matmul", "overlapped"), ("matmul_reduce_scatter", "overlapped")]
    assert report.after.count("overlap_inductor.agree.default(") == 1
    order = re.findall(r"overlap_inductor\.(gather_start|gather_step|exchange_start|exchange_send|exchange_wait)", report.after)
    assert order == ["gather_start", "gather_step", "exchange_start", "exchange_send", "exchange_wait"]


def test_ids_differ_and_stay() -> None:
    """Reports, traces and graphs join on the id: two equal layers must not share one, nor may it change from run to run."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_reduce(all_reduce(x @ w, "sum", world()).relu() @ w, "sum", world())

    first, second = ([s.facts.id for s in traced(fn, (4, 16), (16, 16)).sites] for _ in range(2))
    assert len(set(first)) == 2 and first == second


# Symbols


@pytest.mark.parametrize("kind", ["gather", "gather inner dim", "reduce", "scatter", "head"])
def test_rows_that_are_a_product_of_symbols(kind: str) -> None:
    """Batch and tokens both dynamic: M is s0*s1, and no rewrite may need it to be known or tie the graph to its example."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 6, 16, dynamic=(0, 1))
        w = made.input(16, 8, name="w")
        batch, tokens, _ = x.meta["val"].shape
        if kind.startswith("gather"):
            gathered = made.gather_on(x, 1) if kind == "gather inner dim" else made.gather(x)
            sizes = gathered.meta["val"].shape
            result = made.mm(made.view(gathered, sizes[0] * sizes[1], 16), w)
        else:
            y = made.mm(made.view(x, batch * tokens, 16), w)
            collective = {"reduce": made.reduce, "scatter": made.scatter, "head": made.gather}[kind]
            result = collective(made.view(y, batch, tokens, 8) if kind == "reduce" else y)
        made.output(result)
        report = made.run(sub_chunks=2)
        for guard in made.shapes.guards:
            for rows, columns in ((4, 6), (6, 8), (10, 12), (32, 200)):
                assert guard.expr.subs({batch.node.expr: rows, tokens.node.expr: columns}), guard
    assert [f[2] for f in facts(report)] == ["overlapped"], (report.notices, report.near_misses)
    assert "*" in str(report.sites[0].facts.matmuls[0].m)


def test_two_dynamic_dims_when_traced() -> None:
    """The same through Dynamo."""
    with fake_group(2), torch.no_grad():
        x = torch.randn(4, 6, 16)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        report = report_of(lambda x, w: all_reduce(x @ w, "sum", world()), x, torch.randn(16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M"], "overlapped")]
    assert "*" in str(report.sites[0].facts.matmuls[0].m)


def test_dynamic_shapes_compile_once() -> None:
    """A guard added by the pass makes every new token count a new compile, on some ranks and not on others."""
    from torch._dynamo.testing import CompileCounter
    from torch._functorch.aot_autograd import aot_module_simplified

    reports: list[OverlapReport] = []
    frames = CompileCounter()

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        frames(module, inputs)

        def lower(lowered: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            # The pass on a copy: what runs afterwards is the plain graph, under the same guards.
            copied = torch.fx.GraphModule(lowered, torch.fx.Graph())
            copied.graph.output(copied.graph.graph_copy(lowered.graph, {}))
            for node, twin in zip(lowered.graph.nodes, copied.graph.nodes, strict=True):
                twin.meta = dict(node.meta)
            reports.append(run_overlap_pass(copied.graph, OverlapConfig(schedule="ring", sub_chunks=2), is_inference=True))
            return lowered.forward

        return aot_module_simplified(module, inputs, fw_compiler=lower)

    with fake_group(2), torch.no_grad():
        fn = torch.compile(lambda x, w: all_gather(x, 0, world()) @ w, backend=backend)
        w = torch.randn(16, 8)
        for tokens in (6, 10, 7, 128):
            x = torch.randn(tokens, 16)
            torch._dynamo.mark_dynamic(x, 0)
            fn(x, w)
    assert frames.frame_count == 1
    (report,) = reports
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")], report.notices


def test_collectives_in_place_of_the_own_op_are_not_touched() -> None:
    """A collective of the same group without a matmul keeps its arguments."""
    with fake_group(4):
        made = HandGraph()
        started = made.call(c10d.all_gather_into_tensor.default, made.input(3), 4, made.group)
        report = made.output(made.wait(started), made.mm(made.gather(made.input(4, 16, name="a")), made.input(16, 8, name="w"))).run()
    assert "_c10d_functional.all_gather_into_tensor.default(x, 4, '0')" in report.after

# SPDX-License-Identifier: Apache-2.0
"""Ops around a site's collective: matmuls of all kinds, sums of matmuls, a model's head, and ops between matmul and
collective."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import config as inductor_config

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.compile.readings import traced
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.spellings import world
from tests.support.structures import GatheredWeight
from tests.support.structures import GatherTokens

PREFETCHED = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["reorder_communication_preserving_peak_memory"],
}
"""Settings with which Inductor starts gathers under earlier work."""

# Readers of the gathered tensor


def test_one_gather_feeds_matmuls_of_several_kinds_and_roles() -> None:
    """All matmuls that read the gathered tensor belong to one site. Otherwise the tensor would be gathered twice, or a
    matmul would wait for the end of the ring."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 16)
        weights = (
            made.input(16, 8, name="w"),
            made.input(6, 8, name="left"),
            made.input(8, name="bias"),
            made.input(5, 16, name="rows"),
        )
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
    ("role", "left", "dim"),
    [("M", (), 0), ("K", (), 1), ("K", (6, 8), 0), ("N", (6, 4), 1)],
    ids=["left M", "left K", "right K", "right N"],
)
def test_gathered_on_either_side(role: str, left: tuple[int, ...], dim: int) -> None:
    """A wrong role of the gathered dim would put pieces into wrong rows, or would not add them up."""
    with fake_group(2):
        made = HandGraph()
        x = made.call(aten.relu.default, made.input(4, 16))
        gathered = made.gather_on(x, dim) if dim else made.gather(x)
        k = gathered.meta["val"].shape[1]
        report = made.output(
            made.mm(made.input(*left, name="l"), gathered) if left else made.mm(gathered, made.input(k, 8, name="w"))
        ).run()
    assert facts(report) == [("all_gather_matmul", [f"mm {role}"], "overlapped")]
    assert ("assemble" in report.after) is (role != "K")
    if role == "K":
        assert re.search(r"aten\.(addmm|add)\.", report.after)


def test_gathered_tensor_is_used_elsewhere_too() -> None:
    """The other reader must read the ring's buffer after the last hop. There must be no second all-gather."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x, 0, world())
        return gathered @ w, gathered.sum(), gathered

    report = traced(fn, (4, 16), (16, 8))
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")]
    lines = report.after.splitlines()
    last_hop = max(i for i, line in enumerate(lines) if "gather_step" in line)
    reader = next(i for i, line in enumerate(lines) if "aten.sum" in line)
    assert (
        "all_gather_into_tensor" not in report.after and "gather_start_default" in lines[reader] and reader > last_hop
    )
    assert "gather_start_default" in lines[-1]


def test_gathered_tensor_saved_for_backward() -> None:
    """wgrad needs the gathered activation. The site must be found, and the collective must not stay in the graph."""
    with fake_group(2):
        x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
        forward, backward = reports_of(lambda x, w: (GatherTokens.apply(x).relu() @ w).relu(), x, w)
    assert facts(forward) == [("all_gather_matmul", ["mm M"], "overlapped")]
    assert "_c10d_functional" not in forward.after
    assert ("matmul_reduce_scatter", ["mm M"], "overlapped") in facts(backward)


def test_input_of_the_collective_is_an_output() -> None:
    """If the collective's input is read elsewhere, a gather is overlapped and a reduction is refused."""
    gather = traced(lambda x, w: ((y := x.relu()), all_gather(y, 0, world()) @ w), (4, 16), (16, 8))
    assert facts(gather) == [("all_gather_matmul", ["mm M"], "overlapped")]
    reduction = traced(lambda x, w: ((y := x @ w), all_reduce(y, "sum", world())), (4, 16), (16, 8))
    assert facts(reduction) == [("matmul_all_reduce", ["mm M"], "refused")]
    assert [r.code for r in reduction.sites[0].decision.reasons] == [
        "other_users"
    ] and reduction.before == reduction.after


# Sums


def test_sum_of_matmuls_into_one_scatter() -> None:
    """Every term must be cut into slices. Otherwise a whole term would be added to a slice."""
    with fake_group(2):
        made = HandGraph()
        x, y = made.input(4, 16), made.input(4, 32, name="y")
        terms = made.mm(x, made.input(16, 8, name="w")), made.mm(y, made.input(32, 8, name="v"))
        report = made.output(made.scatter(made.call(aten.add.Tensor, *terms))).run(sub_chunks=1)
    assert facts(report) == [("matmul_reduce_scatter", ["mm M", "mm M"], "overlapped")]
    assert len(re.findall(r"float32\[2, 8\] = aten\.mm", report.after)) == 2
    assert len(re.findall(r"float32\[2, 8\] = aten\.addmm", report.after)) == 2


def test_two_all_reduces_added_are_one() -> None:
    """One all-reduce of a sum replaces a sum of all-reduces. If a term is also read elsewhere, each all-reduce stays a
    site."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "sum", world())

    report = traced(fn, (4, 16), (16, 8), (16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M", "mm M"], "overlapped")]

    def three(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ w, "sum", world()) + (
            all_reduce(x @ v, "sum", world()) + all_reduce(x @ (w + v), "sum", world())
        )

    assert facts(traced(three, (4, 16), (16, 8), (16, 8))) == [
        ("matmul_all_reduce", ["mm M", "mm M", "mm M"], "overlapped")
    ]

    def partly(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (
            all_reduce(x @ w, "sum", world())
            + all_reduce(x @ v, "sum", world())
            + all_reduce(torch.softmax(x @ (w * v), 0), "sum", world())
        )

    report = traced(partly, (4, 16), (16, 8), (16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M", "mm M"], "overlapped")] and codes(report) == ["op_between"]

    def used(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = all_reduce(x @ w, "sum", world())
        return left + all_reduce(x @ v, "sum", world()), left.relu()

    assert [f[0] for f in facts(traced(used, (4, 16), (16, 8), (16, 8)))] == ["matmul_all_reduce"] * 2


def test_all_reduces_of_other_kinds_are_not_merged() -> None:
    """A sum and an average over ranks stay two sites, although their results are added."""
    report = traced(
        lambda x, w, v: all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "avg", world()), (4, 16), (16, 8), (16, 8)
    )
    assert [f[0] for f in facts(report)] == ["matmul_all_reduce"] * 2


# The head


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_head(dim: int) -> None:
    """A matmul's result is gathered, as logits are on the vocabulary dim."""
    report = traced(lambda x, w: all_gather(x @ w, dim, world()), (4, 16), (16, 8))
    assert facts(report) == [("matmul_all_gather", ["mm M"], "overlapped")]


def test_sharded_head_whose_logits_a_later_matmul_reads() -> None:
    """The later matmul reads the logits through an op that does not commute with the gather. The finder must also look
    before the gather."""
    report = traced(lambda x, w, v: torch.cumsum(all_gather(x @ w, 0, world()), 0) @ v, (4, 16), (16, 8), (8, 4))
    assert facts(report) == [("matmul_all_gather", ["mm M"], "overlapped")] and report.near_misses == []


# Ops between matmul and collective


def test_ops_that_commute_after_a_gather_are_part_of_the_site() -> None:
    """Cast, scale and activation are applied to each piece. Most sites of real models have such ops."""
    report = traced(
        lambda x, w, s: (all_gather(x, 0, world()) * s).relu().double() @ w.double(), (4, 16), (16, 8), (1,)
    )
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")]
    assert report.after.count("aten.relu.default(") == report.after.count("gather_step.default(") + 1


def test_ops_that_commute_before_a_reduction_are_part_of_the_site() -> None:
    """The ops are a bias for each column, a scale, an activation and a cast."""
    report = traced(
        lambda x, w, b: all_reduce(((x @ w + b) * 3).relu().double(), "sum", world()), (4, 16), (16, 8), (8,)
    )
    assert facts(report) == [("matmul_all_reduce", ["addmm M"], "overlapped")] and report.near_misses == []


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_between_is_a_near_miss(dim: int) -> None:
    """The report must say ``op_between``, not ``no_matmul``. After a gather, a softmax over columns is part of a site:
    it treats each row by itself. Before an all-reduce, a softmax is never part of a site."""
    after = traced(lambda x, w: torch.softmax(all_gather(x, 0, world()), dim) @ w, (4, 16), (16, 8))
    before = traced(lambda x, w: all_reduce(torch.softmax(x @ w, dim), "sum", world()), (4, 16), (16, 8))
    for report in (after, before)[dim:]:
        assert facts(report) == [] and codes(report) == ["op_between"]
        assert report.before == report.after


@pytest.mark.parametrize("rows", [True, False])
def test_a_part_of_an_activation_that_the_activation_reads(rows: bool) -> None:
    """The first row (or column) of the activation multiplies the activation. It needs the whole matmul, so a site would
    compute the matmul twice."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).relu()
        return all_reduce(y * (y[:1] if rows else y[:, :1]), "sum", world())

    report = traced(fn, (4, 16), (16, 8))
    assert facts(report) == [] and codes(report) == ["op_between"] and report.before == report.after


def test_a_matmul_of_a_result_that_is_added_to_it() -> None:
    """The second matmul needs the whole result of the first one. A site of both would compute the first one twice."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return all_reduce(y * 2 + (y @ v).relu(), "sum", world())

    report = traced(fn, (4, 16), (16, 16), (16, 16))
    assert facts(report) == [] and codes(report) == ["op_between"] and report.before == report.after


def test_collective_alone() -> None:
    report = traced(lambda x: all_reduce(x, "sum", world()) * 2, (4, 16))
    assert facts(report) == [] and codes(report) == ["no_matmul"] and report.before == report.after


def test_weight_gather_is_overlapped_if_nothing_else_hides_it() -> None:
    """By default, Inductor does not move FSDP's gather away from the use of the weight. So the gather is overlapped."""
    module = GatheredWeight(8, 8)
    report = traced(lambda x: x.bfloat16() @ all_gather(module.weight.bfloat16(), 0, world()), (4, 16))
    assert facts(report) == [("all_gather_matmul", ["mm K"], "overlapped")] and codes(report) == []


@inductor_config.patch(PREFETCHED)
def test_weight_gather_is_left_to_prefetching() -> None:
    """If Inductor moves FSDP's gathers under earlier work, the pass leaves them to Inductor. A cast between weight and
    gather does not change this."""

    module = GatheredWeight(8, 8)
    report = traced(lambda x: x.bfloat16() @ all_gather(module.weight.bfloat16(), 0, world()), (4, 16))
    assert facts(report) == [] and codes(report) == ["fsdp_weight_gather"]


@inductor_config.patch(PREFETCHED)
@pytest.mark.parametrize("trained", [False, True])
def test_parameters_are_distinguished_from_activations(trained: bool) -> None:
    """The activation is an input of the graph and a right operand, as an FSDP weight is. The finder must not take the
    activation for a weight."""
    module = GatheredWeight(8, 8)

    def fn(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return module(x).relu(), (a @ GatherTokens.apply(y)).relu()

    with fake_group(2), torch.set_grad_enabled(trained):
        report, *_ = reports_of(fn, torch.randn(4, 16), torch.randn(4, 6, requires_grad=trained), torch.randn(5, 8))
    assert facts(report) == [("all_gather_matmul", ["mm K"], "overlapped")] and codes(report) == ["fsdp_weight_gather"]


def test_operand_behind_another_collective() -> None:
    """With full activation checkpointing, the backward gathers the gradient, then recomputes the operand of wgrad from
    another gather. Both must be overlapped."""
    with fake_group(2):
        made = HandGraph()
        gradient = made.gather(made.input(4, 16, name="g"))
        data = made.mm(gradient, made.input(16, 8, name="w"))
        again = made.mm(made.gather(made.input(4, 6, name="x")), made.input(6, 8, name="v"))
        weights = made.mm(made.call(aten.permute.default, gradient, [1, 0]), made.call(aten.relu.default, again))
        report = made.output(made.call(aten.mul.Tensor, data, again), weights).run(sub_chunks=1)
    assert facts(report) == [
        ("all_gather_matmul", ["mm M", "mm K"], "overlapped"),
        ("all_gather_matmul", ["mm M"], "overlapped"),
    ]
    starts = [m.start() for m in re.finditer(r"gather_start\.default\([^)]*", report.after)]
    assert ", x," in report.after[starts[0] :].splitlines()[0] and len(starts) == 2


def test_an_op_that_sinks_with_a_gather_and_is_read_elsewhere() -> None:
    """A gather moves down to its matmuls. An op between gather and matmuls is also read elsewhere. The op must move
    down too, because it reads the buffer of the steps."""
    with fake_group(2):
        made = HandGraph()
        gradient = made.call(aten.relu.default, made.gather(made.input(4, 16, name="g")))
        data = made.mm(gradient, made.input(16, 8, name="w"))
        again = made.mm(made.gather(made.input(4, 6, name="x")), made.input(6, 8, name="v"))
        weights = made.mm(made.call(aten.permute.default, gradient, [1, 0]), made.call(aten.relu.default, again))
        report = made.output(made.call(aten.mul.Tensor, data, again), weights, gradient).run()
    assert [status for _, _, status in facts(report)] == ["overlapped", "overlapped"] and report.notices == []

# SPDX-License-Identifier: Apache-2.0
"""A graph for every reason why a collective leads to no site."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor import config as inductor_config

from overlap_inductor.report.report import OverlapReport
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.hand_graph import c10d
from tests.support.hand_graph import getitem
from tests.unit.reasons import case
from tests.unit.reasons import weight

# Collectives that cannot be a site


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
    started = made.call(
        c10d.all_reduce_coalesced.default, [made.mm(made.input(4, 16), weight(made))], "sum", made.group
    )
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


@case("uneven_splits", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.call(aten.relu.default, made.mm(made.input(4, 16), weight(made)))
    return made.output(made.wait(made.call(c10d.all_to_all_single.default, y, [2, 2], [1, 3], made.group))).run()


@case("uneven_splits", "near_miss", "known at run time")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.unbacked_input(16)
    sizes = [made.call(aten.sym_size.int, x, 0) for _ in range(2)]
    exchanged = made.wait(made.call(c10d.all_to_all_single.default, x, sizes, sizes, made.group))
    return made.output(made.mm(made.call(aten.relu.default, exchanged), weight(made))).run()


@case("uneven_splits", "near_miss", "a change of shards")
def _() -> OverlapReport:
    import torch.distributed.tensor  # noqa: F401  (defines the operator)

    made = HandGraph()
    y = made.mm(made.input(4, 16), made.input(16, 7, name="w"))
    moved = made.graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (y, 0, 1, made.group))
    with made.mode:
        moved.meta["val"] = torch.empty(8, 3)
    return made.output(moved).run()


@case("one_table", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    table = made.input(7, 4)
    indices, offsets = (made.input(size, dtype=torch.int64, name=f"i{size}") for size in (9, 8))
    bags = made.call(getitem, made.call(aten._embedding_bag.default, table, indices, offsets), 0)
    return made.output(made.wait(made.call(c10d.all_to_all_single.default, bags, [4, 4], [4, 4], made.group))).run()


@case("pattern_not_available", "near_miss", "broadcast")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.wait(made.call(c10d.broadcast.default, y, 0, made.group))).run()


@case("pattern_not_available", "near_miss", "of symmetric memory")
def _() -> OverlapReport:
    import torch.distributed._symmetric_memory  # noqa: F401  (defines the operator)

    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.call(torch.ops.symm_mem.one_shot_all_reduce.default, y, "sum", made.group)).run()


# Gathers and reductions that lead to no site


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


@case("no_matmul", "near_miss", "reduction before a matmul")
def _() -> OverlapReport:
    made = HandGraph()
    report = made.output(made.mm(made.reduce(made.input(4, 16)), weight(made))).run()
    assert "reads the collective's result" in report.near_misses[0].reason.text
    return report


@case("weight_depends_on_collective", "near_miss", "an op that is not row-wise")
def _() -> OverlapReport:
    """Each row's maximum is subtracted, but ``max.dim`` is not a known row-wise op."""
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    largest = made.call(getitem, made.call(aten.max.dim, gathered, 1, True), 0)
    report = made.output(made.mm(made.call(aten.sub.Tensor, gathered, largest), weight(made))).run()
    assert "which needs the whole result of the all-gather" in report.near_misses[0].reason.text
    return report


@case("op_between", "near_miss", "a part of the summed tensor")
def _() -> OverlapReport:
    """An add reads two tensors computed from the matmul's result: the sum over the experts, and the first expert's
    rows. If the add were computed in pieces, the first expert's rows would be multiplied twice."""
    made = HandGraph()
    y = made.call(aten.bmm.default, made.input(3, 8, 16), made.input(3, 16, 4, name="w"))
    first = made.call(aten.squeeze.dim, made.call(aten.slice.Tensor, y, 0, 0, 1), 0)
    return made.output(made.reduce(made.call(aten.add.Tensor, made.call(aten.sum.dim_IntList, y, [0]), first))).run()


def grouped(made: HandGraph, x: fx.Node, rows: int) -> fx.Node:
    """Multiply ``x [rows, 16]`` by the weights ``[16, 16]`` of four experts."""
    experts, ends = (
        made.input(4, 16, 16, dtype=torch.bfloat16, name="experts"),
        made.input(4, dtype=torch.int32, name="ends"),
    )
    node = made.graph.call_function(aten._grouped_mm.default, (x, experts, ends))
    with made.mode:
        node.meta["val"] = torch.empty(rows, 16, dtype=torch.bfloat16)
    return node


def reduced_experts(made: HandGraph, saved: bool) -> OverlapReport:
    """The experts' results are weighted, put back into the order of the tokens, and summed.

    - ``saved``: the weighted results are also an output;
    - not ``saved``: a running sum over the rows of the results is weighted, and the results are not.
    """
    y = grouped(made, made.input(8, 16, dtype=torch.bfloat16), 8)
    if not saved:
        y = made.call(aten.cumsum.default, y, 0)
    weighted = made.call(aten.mul.Tensor, y, made.input(8, 1, dtype=torch.bfloat16, name="share"))
    back = made.call(aten.index.Tensor, weighted, [made.input(8, dtype=torch.int64, name="order")])
    total = made.reduce(made.call(aten.sum.dim_IntList, made.view(back, 4, 2, 16), [1]))
    return made.output(total, *([weighted] if saved else [])).run()


@case("grouped_matmul", "near_miss", "experts, reduced")
def _() -> OverlapReport:
    return reduced_experts(HandGraph(), saved=False)


@case("other_users", "near_miss", "experts, saved")
def _() -> OverlapReport:
    return reduced_experts(HandGraph(), saved=True)


@case("grouped_matmul", "near_miss", "experts, gathered")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16, dtype=torch.bfloat16))
    return made.output(
        grouped(made, made.call(aten.index.Tensor, gathered, [made.input(8, dtype=torch.int64, name="order")]), 8)
    ).run()


@case("fsdp_weight_gather", "near_miss")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(4, 16)
    made.output(made.mm(x, made.gather(made.input(8, 8, name="shard"))))
    with inductor_config.patch({"aten_distributed_optimizations.enable_overlap_scheduling": True}):
        return made.run()


def weight_gradient(made: HandGraph) -> fx.Node:
    """The gradient of a layer's weight, in a backward graph."""
    tangents, x = made.input(4, 8, name="tangents_1"), made.input(4, 16)
    return made.mm(made.call(aten.permute.default, tangents, [1, 0]), x)


@case("data_parallel_gradient", "near_miss", "scattered")
def _() -> OverlapReport:
    made = HandGraph()
    made.output(made.scatter(weight_gradient(made)))
    with inductor_config.patch(
        reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=["sink_waits"]
    ):
        return made.run(is_inference=False)


@case("data_parallel_gradient", "near_miss", "reduced, a norm's")
def _() -> OverlapReport:
    made = HandGraph()
    made.output(made.reduce(made.call(aten.sum.dim_IntList, made.input(4, 8, name="tangents_1"), [0])))
    with inductor_config.patch({"aten_distributed_optimizations.enable_overlap_scheduling": True}):
        return made.run(is_inference=False)


@case("no_matmul", "near_miss", "the gradient of a bias")
def _() -> OverlapReport:
    """The gradient is the sum of a matmul's rows. The matmul itself computes the gradient of an activation."""
    made = HandGraph()
    y = made.call(aten.relu.default, made.mm(made.input(4, 8, name="tangents_1"), weight(made, 8)))
    report = made.output(made.reduce(made.call(aten.sum.dim_IntList, y, [0])), y).run(is_inference=False)
    assert "sum_dim_int_list (aten.sum.dim_IntList) computes the gradient" in report.near_misses[0].reason.text
    return report


@case("coalesced", "near_miss", "gradients in one tensor")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.view(weight_gradient(made), 128)
    total = made.reduce(made.call(aten.cat.default, [y, made.call(aten.neg.default, y)]))
    parts = made.call(aten.split.Tensor, total, 128)
    return made.output(*(made.view(made.call(getitem, parts, i), 8, 16) for i in range(2))).run(is_inference=False)


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
    powers = made.call(
        aten.exp.default, made.call(aten.sub.Tensor, gathered, made.call(aten.amax.default, gathered, [0], True))
    )
    shares = made.call(aten.div.Tensor, powers, made.call(aten.sum.dim_IntList, powers, [0], True))
    return made.output(made.mm(shares, weight(made))).run()


@case("op_between", "near_miss", "gathered tensor in two orders")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(8, 16))
    return made.output(
        made.mm(made.call(aten.mul.Tensor, gathered, made.call(aten.permute.default, gathered, [1, 0])), weight(made))
    ).run()


def behind_gather(made: HandGraph, node: fx.Node, k: int = 16) -> OverlapReport:
    return made.output(made.mm(node, weight(made, k))).run()


@case("op_between", "near_miss", "rows of a gathered tensor")
def _() -> OverlapReport:
    made = HandGraph()
    return behind_gather(made, made.call(aten.slice.Tensor, made.gather(made.input(4, 16)), 0, 1, 6))


@case("op_between", "near_miss", "other rows beside a gathered tensor")
def _() -> OverlapReport:
    made = HandGraph()
    return behind_gather(
        made, made.call(aten.cat.default, [made.input(3, 16, name="y"), made.gather(made.input(4, 16))])
    )


@case("op_between", "near_miss", "rows of a gathered tensor in another order")
def _() -> OverlapReport:
    made = HandGraph()
    return behind_gather(
        made,
        made.call(aten.index.Tensor, made.gather(made.input(4, 16)), [made.input(8, dtype=torch.int64, name="order")]),
    )


@case("op_between", "near_miss", "a running sum over the gathered dim")
def _() -> OverlapReport:
    made = HandGraph()
    return behind_gather(made, made.call(aten.cumsum.default, made.gather(made.input(4, 16)), 0))


@case("op_between", "near_miss", "rows of a matmul")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.reduce(made.call(aten.slice.Tensor, y, 0, 1, 3))).run()


@case("layout", "near_miss", "rows of two matmuls, reduced")
def _() -> OverlapReport:
    made = HandGraph()
    w = weight(made)
    return made.output(
        made.reduce(
            made.call(aten.cat.default, [made.mm(made.input(4, 16), w), made.mm(made.input(6, 16, name="y"), w)])
        )
    ).run()


@case("layout", "near_miss", "rows of two matmuls, scattered")
def _() -> OverlapReport:
    made = HandGraph()
    w = weight(made)
    return made.output(
        made.scatter(
            made.call(aten.cat.default, [made.mm(made.input(4, 16), w), made.mm(made.input(6, 16, name="y"), w)])
        )
    ).run()


@case("matmul_form", "near_miss", "a vector behind a gather")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.call(aten.mv.default, made.gather(made.input(4, 16)), made.input(16, name="v"))).run()


@case("matmul_form", "near_miss", "a vector behind a gather, as Inductor writes it")
def _() -> OverlapReport:
    made = HandGraph()
    product = made.call(aten.mul.Tensor, made.gather(made.input(4, 16)), made.input(16, name="v"))
    return made.output(made.call(aten.sum.dim_IntList, product, [1])).run()


@case("matmul_form", "near_miss", "a vector, reduced")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.reduce(made.call(aten.mv.default, made.input(4, 16), made.input(16, name="v")))).run()


@case("matmul_form", "near_miss", "a convolution, reduced")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.call(
        aten.convolution.default, made.input(2, 4, 9), made.input(5, 4, 3, name="w"), None, [1], [0], [1], False, [0], 1
    )
    return made.output(made.reduce(y)).run()


@case("weight_depends_on_collective", "near_miss", "computed")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    square = made.call(
        aten.relu.default, made.call(aten.cumsum.default, made.call(aten.permute.default, gathered, [1, 0]), 0)
    )
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
    x, w = made.input(32, 16, dtype=torch.float8_e4m3fn), made.input(48, 32, dtype=torch.float8_e4m3fn, name="w")
    scales = [made.input(name=name) for name in ("scale_a", "scale_b")]
    gathered = made.gather_on(x, 1)
    turned = made.call(aten.permute.default, w, [1, 0])
    y = made.call(aten._scaled_mm.default, gathered, turned, *scales, None, None, torch.bfloat16)
    return made.output(y).run()


@case("layout", "near_miss", "gather")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.view(made.gather(made.input(3, 16)), 4, 24)
    return made.output(made.mm(gathered, made.input(24, 8, name="w"))).run()


@case("layout", "near_miss", "reduction")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.view(made.mm(made.input(4, 16), weight(made)), 2, 2, 8)
    return made.output(made.reduce(made.call(aten.mul.Tensor, y, made.input(2, 1, 1, name="per_batch")))).run()


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

# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has the same values on every rank of a group, and on which inputs that depends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from overlap_inductor.passes.sequence.same_values import SameValues
from overlap_inductor.passes.sequence.same_values import inputs_to_compare
from tests.support.fake_group import fake_group
from tests.support.hand_graph import c10d
from tests.support.hand_graph import getitem
from tests.support.token_graph import TokenGraph

Op = Callable[[TokenGraph, fx.Node], fx.Node]


def constant(g: TokenGraph, count: int) -> fx.Node:
    """A constant tensor of the module that owns the graph."""
    node = g.graph.get_attr("constant")
    node.meta["val"] = g.mode.from_tensor(torch.ones(count))
    return node


def of(g: TokenGraph, kind: str, x: fx.Node, group: str, *args: object) -> fx.Node:
    return g.wait(g.call(getattr(c10d, kind).default, x, *args, group))


SAME: dict[str, tuple[set[str], Op]] = {
    "an input": ({"x"}, lambda g, x: x),
    "computed": ({"x"}, lambda g, x: g.op("rsqrt.default", g.op("mean.dim", x, [-1]))),
    "of two inputs": ({"x", "same_1"}, lambda g, x: g.op("add.Tensor", x, g.same(8, 6))),
    "an element of several": ({"x"}, lambda g, x: g.call(getitem, g.op("split.Tensor", x, 4), 1)),
    "an all-reduce": (set(), lambda g, x: g.reduce(x)),
    "an all-reduce of what differs": (set(), lambda g, x: g.reduce(g.op("rand_like.default", x))),
    "an all-gather": (set(), lambda g, x: g.gather(x)),
    "made without inputs": (set(), lambda g, x: g.op("arange.default", 8)),
    "through an all-reduce": ({"same_1"}, lambda g, x: g.op("mul.Tensor", g.reduce(x), g.same(8, 6))),
}
DIFFERENT: dict[str, Op] = {
    "a matmul": lambda g, x: g.mm(x, g.same(6, 5)),
    "behind a matmul": lambda g, x: g.op("neg.default", g.mm(x, g.same(6, 5))),
    "a batched matmul": lambda g, x: g.op("bmm.default", g.same(2, 3, 4), g.same(2, 4, 3)),
    "a convolution": lambda g, x: g.op(
        "convolution.default", g.same(2, 4, 9), g.same(5, 4, 3), None, [1], [0], [1], False, [0], 1
    ),
    "random numbers": lambda g, x: g.op("rand.default", [8, 6]),
    "dropout": lambda g, x: g.call(getitem, g.op("native_dropout.default", x, 0.5, True), 0),
    "a reduce-scatter": lambda g, x: g.scatter(x),
    "an all-to-all": lambda g, x: of(g, "all_to_all_single", x, g.group, [4, 4], [4, 4]),
    "a constant, whose value may be the rank's own": lambda g, x: constant(g, 1),
    "in place": lambda g, x: g.op("relu_.default", x),
}


@pytest.mark.parametrize("name", SAME)
def test_same(name: str) -> None:
    inputs, op = SAME[name]
    with fake_group(2):
        g = TokenGraph()
        node = op(g, g.input(8, 6))
        found = SameValues(g.group).inputs_of(node)
    assert found is not None and {n.name for n in found} == inputs


@pytest.mark.parametrize("name", DIFFERENT)
def test_may_differ(name: str) -> None:
    with fake_group(2):
        g = TokenGraph()
        node = DIFFERENT[name](g, g.input(8, 6))
        assert SameValues(g.group).inputs_of(node) is None


def test_a_result_of_another_group_without_a_mesh_may_differ() -> None:
    """The group is ranks 0 and 1. Rank 0 may also be in a group with rank 2, and rank 1 in a group with rank 3. The
    sums of these two groups may differ."""
    with fake_group(4):
        mine, other = (torch.distributed.new_group(ranks) for ranks in ([0, 1], [0, 2]))
        g = TokenGraph()
        x = g.input(8, 6)
        by_other = of(g, "all_reduce", x, other.group_name, "sum")
        by_mine = of(g, "all_reduce", by_other, mine.group_name, "sum")
        same = SameValues(mine.group_name)
        assert same.inputs_of(by_other) is None and same.inputs_of(by_mine) == frozenset()


def test_another_dim_of_one_mesh_keeps_ranks_alike() -> None:
    """The group is a row of the mesh, and each rank sums over its own column. If the summed parts are equal along each
    row, these sums are equal."""
    with fake_group(4):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor = (mesh.get_group(name).group_name for name in ("data", "tensor"))
        g = TokenGraph()
        x = g.input(8, 6)
        same = SameValues(tensor)
        gathered = g.wait(g.call(c10d.all_gather_into_tensor.default, x, 2, data))
        assert same.inputs_of(of(g, "all_reduce", x, data, "sum")) == {x} == same.inputs_of(gathered)
        scattered = g.wait(g.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, data))
        assert same.inputs_of(scattered) is None


def test_inputs_to_compare_are_tensors_in_graph_order() -> None:
    with fake_group(2):
        g = TokenGraph()
        first, second = g.same(4), g.same(4)
        size = g.graph.placeholder("s")
        size.meta["val"] = g.shapes.create_unbacked_symint()
        reads = {first: frozenset({second, size}), second: frozenset({first})}
    assert inputs_to_compare(reads) == [first, second]

# SPDX-License-Identifier: Apache-2.0
"""Matmuls with a small weight that is whole on every rank. Such a matmul can be computed on rows, so that its narrow
result is gathered in place of its wide input::

    n [T, 7168]; q = mm(n, wq [7168, 1536]); c = mm(n, wc [7168, 576])
    gather of n, 7168 wide    ->    q, c on rows; gathers of q and c (or of what is computed from them), 2112 wide

The latent attention of DeepSeek has such matmuls (arXiv:2405.04434, section 2.1). Each rank then also computes only
1 / W of their rows.

A graph does not show whether a weight is whole. Frameworks that pass shards as ``DTensor`` pass whole weights as plain
tensors. So a plain parameter counts as whole if other inputs of the graph are parts of tensor subclasses. The ranks
then compare the weight, as they compare every tensor that rows read (``same_values``).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rules import Held
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.torch_compat.graph_inputs import beside_subclasses
from overlap_inductor.torch_compat.graph_inputs import is_parameter

_KINDS = ("mm", "addmm")


def may_be(node: fx.Node) -> bool:
    """Whether ``node`` is a matmul of a kind that this rule computes, with a whole weight on its right."""
    found = matmuls.parse(node)
    if found is None or found.kind not in _KINDS or node.kwargs:
        return False
    return is_whole(found.rhs) and (found.bias is None or is_whole(found.bias))


def is_whole(node: Any) -> bool:
    """Whether ``node`` is a plain parameter of a graph that has subclass parameters, possibly cast, viewed or
    transposed."""
    while node.op == "call_function" and (
        tools.is_cast(node) or tools.is_reshape(node) or tools.permutation(node) is not None
    ):
        node = node.args[0]
    return node.op == "placeholder" and is_parameter(node) is True and beside_subclasses(node)


class ReplicatedMatmul:
    """``mm`` and ``addmm`` with a whole weight (``rules.Rule``). The rows are the dim M of the left operand."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        found = matmuls.parse(node)
        assert found is not None
        if found.lhs not in held or held[found.lhs].lead != 1:
            raise NotRowWise(f"{node.target} contracts tokens, or reads them as another operand than the left one")
        base = _behind_views(found.lhs)
        readers = list(_readers(base))
        narrow = [n for n in readers if may_be(n)]
        others = [n for n in readers if n not in narrow and (rule_of(n) is None or tools.permutation(n) is not None)]
        if others:
            raise NotRowWise(f"{others[0].name} needs all rows of {base.name}, too")
        wide, width = tools.shape(base)[-1], sum(tools.shape(n)[1] for n in narrow)
        if not isinstance(wide, int) or not isinstance(width, int) or width >= wide:
            raise NotRowWise(
                f"the results of the matmuls that read {base.name} are {width} wide, {base.name} is {wide}"
            )
        return held[found.lhs]

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        found = matmuls.parse(node)
        assert found is not None
        args = tuple(writer.rows(a) if a is found.lhs else a for a in node.args)
        return writer.call(node.target, *args)


def _behind_views(node: fx.Node) -> fx.Node:
    while tools.is_reshape(node):
        node = node.all_input_nodes[0]
    return node


def _readers(base: fx.Node) -> list[fx.Node]:
    """The users of ``base`` and of its views, without the views."""
    found: list[fx.Node] = []
    for user in base.users:
        found += _readers(user) if tools.is_reshape(user) else [user]
    return found

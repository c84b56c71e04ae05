# SPDX-License-Identifier: Apache-2.0
"""Compute matmuls on rows if their weight is whole on every rank and their result is narrower than their input. The
result is then gathered in place of the input::

    n [T, 7168]; q = mm(n, wq [7168, 1536]); c = mm(n, wc [7168, 576])
    gather of n, 7168 wide    ->    q, c on rows; gathers of q and c (or of what is computed from them), 2112 wide

The latent attention of DeepSeek has such matmuls (arXiv:2405.04434, section 2.1). Each rank then also computes only
1 / W of their rows.

A graph does not show whether a weight is whole. Frameworks that pass shards as ``DTensor`` pass whole weights as
plain tensors. So a plain parameter counts as whole under two conditions. Other inputs are parts of a ``DTensor``, and
no matmul or embedding whose result is reduced over ranks has a plain parameter as its operand or table. The ranks
then compare the weight, as they compare every tensor that rows read (``same_values``). No weight counts as whole in a
graph with a backward part. Such a graph has no plain program that could run if the weights differ. The gradient of a
weight also sums over all tokens of the input, so the input is gathered anyway.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import is_one
from overlap_inductor.passes.sequence.rules import Held
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat.graph_inputs import is_parameter
from overlap_inductor.torch_compat.graph_inputs import is_part_of_dtensor

aten = tools.aten

_KINDS = ("mm", "addmm")


class WholeWeights:
    """Finds the matmuls of ``graph`` whose weights count as whole, and how their results are held."""

    def __init__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        trains = any(n.name.startswith("tangents") for n in inputs)
        beside = any(map(is_part_of_dtensor, inputs))
        self._candidates = set[fx.Node]()
        if beside and not trains:
            self._candidates = {n for n in inputs if not is_part_of_dtensor(n) and is_parameter(n) is True}
        if any(self._reduces_shards(collective) for _, _, collective in find_collectives(graph)):
            self._candidates.clear()

    def of(self, node: fx.Node) -> bool:
        """Whether ``node`` is an ``mm`` or ``addmm`` with a whole weight on its right."""
        found = matmuls.parse(node)
        if found is None or found.kind not in _KINDS or node.kwargs or not self._is_whole(found.rhs):
            return False
        return found.bias is None or (self._is_whole(found.bias) and all(map(is_one, tools.shape(found.bias)[:-1])))

    def rows(self, node: fx.Node, held: Held) -> Rows:
        """How the result of ``node``, for which ``of`` is true, is held. The rows are dim M of the left operand.

        Raises:
            NotRowWise: the left operand is not held as rows, or another op needs all its rows. Or it is not wider than
                the results of all such matmuls that read it.
        """
        found = matmuls.parse(node)
        assert found is not None
        if found.lhs not in held or held[found.lhs].lead != 1:
            raise NotRowWise(f"{node.target} contracts tokens, or reads them as another operand than the left one")
        base = _behind_views(found.lhs)
        readers = _readers(base)
        narrow = [n for n in readers if self.of(n)]
        others = [n for n in readers if n not in narrow and (rule_of(n) is None or tools.permutation(n) is not None)]
        if others:
            raise NotRowWise(f"{others[0].name} needs all rows of {base.name}, too")
        wide, width = tools.shape(base)[-1], sum(tools.shape(n)[1] for n in narrow)
        if not isinstance(wide, int) or not isinstance(width, int) or width >= wide:
            raise NotRowWise(
                f"the results of the matmuls that read {base.name} are {width} wide, {base.name} is {wide}"
            )
        return held[found.lhs]

    def _is_whole(self, node: Any) -> bool:
        """Whether ``node`` is a whole parameter, possibly cast, viewed or transposed."""
        while node.op == "call_function" and (
            tools.is_cast(node) or tools.is_reshape(node) or tools.permutation(node) is not None
        ):
            node = node.args[0]
        return node in self._candidates

    def _reduces_shards(self, collective: Any) -> bool:
        """Whether ``collective`` reduces the result of a matmul or of an embedding that reads a plain parameter, or a
        sum of such results. Each rank then has its own shard of this parameter."""
        if not isinstance(collective, CollectiveNode) or collective.reduce_op is None:
            return False
        pending, seen = [collective.input], {collective.input}
        while pending:
            node = pending.pop()
            matmul = matmuls.parse(node)
            if matmul is not None or node.target is aten.embedding.default:
                read = matmul.factors if matmul is not None else node.args[:1]
                if any(self._is_whole(n) for n in read):
                    return True
            elif node.op == "call_function" and (tools.is_reshape(node) or tools.is_pointwise(node)):
                inputs = [n for n in tools.tensor_inputs(node) if n not in seen]
                seen.update(inputs)
                pending += inputs
        return False


def write_rows(node: fx.Node, writer: Writer) -> fx.Node:
    """Write a matmul that ``WholeWeights.rows`` holds as rows, for a rank's rows."""
    found = matmuls.parse(node)
    assert found is not None
    return writer.call(node.target, *(writer.rows(a) if a is found.lhs else a for a in node.args))


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

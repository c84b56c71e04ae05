# SPDX-License-Identifier: Apache-2.0
"""Compute matmuls with the padding of the tokens, if the number of tokens is symbolic and W does not divide it.

The finders of sites follow short last shards only if their sizes are known. So the rows beyond the last token are cut
off after the last op that can be computed with them, not right after the gather. T tokens, W ranks, t = ceil(T / W)::

    x = wait_tensor(all_gather(n)) [W t, H], cut to [T, H]        x = wait_tensor(all_gather(n)) [W t, H]
    y = mm(x, w)                                              ->  y = mm(x, w) [W t, N]
    z = relu(y)                                                   z = relu(y) [W t, N]
    reduce_scatter(pad(mm(z, v)))                                 reduce_scatter(mm(z, v))
    s = attention(y)                                              s = attention(y cut to [T, N])
    reduce_scatter(pad(mm(s, v)))                                 reduce_scatter(mm(pad(s), v))

Contract: a row of a result depends on the same row of its inputs only. So rows beyond the last token may hold any
values, NaN included, and never reach another row. An op that mixes rows reads the rows without padding. An example is
the matmul of a weight's gradient, which sums over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.passes.find_reduce import is_matmul_result
from overlap_inductor.passes.sequence.rows import AllRows
from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.layouts import same_size

aten = tools.aten


class NodeWriter(Writer, Protocol):
    """What the pass needs of ``write.RowWriter``."""

    def padded(self, flat: fx.Node, tokens: Tokens) -> fx.Node:
        """``flat [T, ...]`` with zero rows up to a multiple of the world size."""
        ...

    def full(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        """``node`` as ``[T, *features]``. Its first ``ahead`` dims are expanded to ``dims`` and joined."""
        ...

    def in_place_of(self, node: fx.Node, before: fx.Node | None = None) -> AbstractContextManager[None]:
        """New nodes stand before ``before`` (by default ``node``), with the metadata of ``node``."""
        ...


def compute_padded(
    graph: fx.Graph, cuts: Mapping[fx.Node, Tokens], pads: Mapping[fx.Node, Tokens], nodes: NodeWriter
) -> None:
    """Move the cuts and paddings of ``graph`` in place, as the module's docstring shows.

    Args:
        cuts: the slices ``[T, H]`` of gathered tensors ``[W t, H]``.
        pads: the paddings of ``[T, H]`` to ``[W t, H]`` in front of reduce-scatters.
    """
    pass_ = _PaddedMatmuls(graph, nodes)
    pass_.find(cuts, pads)
    pass_.write()


class _PaddedMatmuls:
    """Implements ``rules.Writer``: a node's rows are its rows of all ranks, ``[W t, *features]``.

    Attributes:
        held: how each node is held that can be computed with the padding.
        starts: the nodes of ``held`` whose padded rows do not come from other nodes of ``held``.
    """

    def __init__(self, graph: fx.Graph, nodes: NodeWriter) -> None:
        self.graph, self.nodes = graph, nodes
        self.held: dict[fx.Node, Rows] = {}
        self.starts: set[fx.Node] = set()
        self._cuts: Mapping[fx.Node, Tokens] = {}
        self._pads: Mapping[fx.Node, Tokens] = {}
        self._needed: set[fx.Node] = set()
        self._written: dict[fx.Node, fx.Node] = {}
        self._cut: dict[tuple[fx.Node, str, str], fx.Node] = {}

    def find(self, cuts: Mapping[fx.Node, Tokens], pads: Mapping[fx.Node, Tokens]) -> None:
        """Find the nodes to compute with the padding: the matmuls that read a gather, the matmuls in front of a
        reduce-scatter, and what is between them."""
        self._cuts, self._pads = cuts, pads
        operands = {node: tokens for pad, tokens in pads.items() for node in _operands(pad, tokens)}
        gathered = set(cuts)
        targets = []
        for node in self.graph.nodes:
            rows = self._rows_of(node)
            if rows is None and (tokens := cuts.get(node, operands.get(node))) is not None:
                self.starts.add(node)
                rows = Rows(AllRows.of(tokens), 1)
            if rows is None:
                continue
            self.held[node] = rows
            from_gather = all(i in gathered for i in node.all_input_nodes if i in self.held)
            if matmuls.parse(node) is None:
                if from_gather and node not in self.starts:
                    gathered.add(node)
            elif from_gather and node not in self.starts:
                targets.append(node)
        targets += [pad.args[0] for pad in pads if pad.args[0] in self.held]
        while targets:
            node = targets.pop()
            if node not in self._needed:
                self._needed.add(node)
                targets += [i for i in node.all_input_nodes if i in self.held and node not in self.starts]
                if not tools.is_tensor(node):
                    # The op has several results, and all of them are computed with the padding.
                    targets += [u for u in node.users if u in self.held]

    def write(self) -> None:
        """Write the found nodes with the padding. Other nodes then read their rows without it."""
        needed = sorted(self._needed)
        replaced = [pad for pad in self._pads if pad.args[0] in self._needed]
        padded = {*replaced, *self._needed} - self.starts
        for node in needed:
            if node in self._cuts:
                self._written[node] = node.args[0]
            elif node in self.starts:
                with self.nodes.in_place_of(min(u for u in node.users if u in padded)):
                    self._written[node] = self.nodes.padded(node, self.held[node].tokens)
            else:
                with self.nodes.in_place_of(node):
                    self._written[node] = self._padded_node(node)
                    self._replace(node, padded)
        for pad in replaced:
            with self.nodes.in_place_of(pad):
                rows = self.reshape(self._written[pad.args[0]], tools.shape(pad))
                if not tools.is_contiguous(rows):
                    rows = self.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
                pad.replace_all_uses_with(rows)
            self.graph.erase_node(pad)
        for node in reversed(needed):
            if node not in self.starts or (node in self._cuts and not node.users):
                self.graph.erase_node(node)

    def _rows_of(self, node: fx.Node) -> Rows | None:
        """How ``node`` is held if it is computed with the padding of its inputs. ``None`` if it cannot be."""
        if node.op != "call_function" or not any(i in self.held for i in node.all_input_nodes):
            return None
        if (matmul := matmuls.parse(node)) is not None:
            return self.held[matmul.lhs] if _is_row_wise(matmul, self.held) else None
        rule = rule_of(node)
        if rule is None:
            return None
        try:
            return rule.held(node, self.held)
        except NotRowWise:
            return None

    def _padded_node(self, node: fx.Node) -> fx.Node:
        rule = rule_of(node)
        if matmuls.parse(node) is None and rule is not None:
            return rule.write(node, self.held[node], self.held, self)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._written.get(n, n))
        return self.call(node.target, *args, **kwargs)

    def _replace(self, node: fx.Node, padded: set[fx.Node]) -> None:
        """Let the users of ``node`` read its rows without the padding, except for the nodes ``padded``."""
        users = [u for u in node.users if u not in padded]
        if not users or not tools.is_tensor(node):
            return
        tokens = self.held[node].tokens
        kept = self.call(aten.slice.Tensor, self._written[node], 0, 0, self.size(tokens.count))
        whole = self.reshape(kept, tools.shape(node))
        for user in users:
            user.replace_input_with(node, whole)

    # ``rules.Writer``

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.nodes.call(target, *args, **kwargs)

    def rows(self, node: fx.Node) -> fx.Node:
        return self._written[node]

    def cut(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        key = node, tokens.group_name, str((ahead, dims))
        if key not in self._cut:
            self._cut[key] = self.nodes.padded(self.nodes.full(node, tokens, ahead, dims), tokens)
        return self._cut[key]

    def reshape(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        return self.nodes.reshape(node, shape)

    def size(self, size: Any) -> Any:
        return self.nodes.size(size)


def _of_tokens(matmul: matmuls.MatmulNode) -> list[fx.Node]:
    """The inputs of ``matmul`` with a row for each token if its left operand has one: this operand, a bias ``[T, N]``
    and a scale ``[T, 1]``."""
    found, bias, scale = [matmul.lhs], matmul.bias, matmul.scales()[0]
    if bias is not None and len(tools.shape(bias)) > 1:
        found.append(bias)
    if scale is not None and not tools.is_scalar_like(scale):
        found.append(scale)
    return found


def _is_row_wise(matmul: matmuls.MatmulNode, held: Mapping[fx.Node, Rows]) -> bool:
    """Whether each row of the result depends on one token only. All inputs with tokens must be in ``held``."""
    if matmul.kind not in ("mm", "addmm", "scaled_mm") or matmul.refusal() is not None:
        return False
    inputs = _of_tokens(matmul)
    if any(i in held and i not in inputs for i in matmul.node.all_input_nodes):
        return False
    return all(i in held and held[i].lead == 1 and held[i].tokens.same(held[matmul.lhs].tokens) for i in inputs)


def _operands(pad: fx.Node, tokens: Tokens) -> list[fx.Node]:
    """The inputs with tokens of the matmuls from which the input of ``pad`` is computed by sums, views and casts. Empty
    if it is computed by other ops."""
    source: Any = pad.args[0]
    if not is_matmul_result(source):
        return []
    found: list[fx.Node] = []
    pending, seen = [source], {source}
    while pending:
        node = pending.pop()
        if (matmul := matmuls.parse(node)) is not None:
            inputs = _of_tokens(matmul)
            if all(same_size(tools.shape(i)[0], tokens.count) for i in inputs):
                found += inputs
            continue
        pending += [i for i in tools.tensor_inputs(node) if i not in seen]
        seen.update(node.all_input_nodes)
    return found

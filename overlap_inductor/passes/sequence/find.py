# SPDX-License-Identifier: Apache-2.0
"""Find the stretches of a graph: all-reduces, and token-wise work after them that each rank can do for its own rows.

``H`` marks nodes that are held as rows::

    w = wait_tensor(all_reduce(mm(...)))       H: a reduce-scatter can make the rows
    r = add(w, residual)                       H: the residual is cut to rows, or is held as rows already
    n = mul(norm(r), weight)                   H
    y = mm(view(n), wq); z = mm(view(n), wk)   need all rows: one gather of n in front of them
    q = mm(view(n), w)                         H, if w is whole on every rank and q is narrow (``replicated``)
    s = sum(mul(grad, n), [0, 1])              a sum over tokens: each rank sums its rows, then the sums are added

A *stretch* is a connected set of all-reduces and nodes that are held as rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.replicated import WholeWeights
from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.passes.sequence.same_values import SameValues
from overlap_inductor.passes.sequence.same_values import symbols_of
from overlap_inductor.passes.sequence.sums import reduces_tokens
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.sites.gradients import is_weight_gradient
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.sizes import hint
from overlap_inductor.torch_compat import operators

aten = tools.aten


@dataclass
class Source:
    """One all-reduce that a reduce-scatter can replace, or several whose results are only added to each other.

    Attributes:
        result: the wait, or the sum of the waits.
        collectives: the all-reduces, in the order in which they are added.
        adds: the nodes that add the results, ``result`` included.
    """

    result: fx.Node
    collectives: list[CollectiveNode]
    adds: list[fx.Node] = field(default_factory=list)


@dataclass
class Stretch:
    """Nodes that are rewritten together.

    Attributes:
        sources: the all-reduces that become reduce-scatters.
        rows: the nodes that are computed on rows, in graph order, without the sources.
        sums: the nodes that reduce all tokens.
        reads: each tensor that a node on rows reads and that is not held as rows, with the graph's inputs from which it
            is computed. The inputs must be the same on all ranks (``same_values``).
        needs_whole: for each node whose rows are gathered, the users that need all rows, each with its reason.
        readers: the users that ``needs_whole`` names before ``gather_less`` changes it.
        whole_too: nodes that are computed with all rows, because gathering their inputs moves no more bytes than
            gathering their results. Those in ``rows`` also run on rows.
    """

    tokens: Tokens
    sources: list[Source] = field(default_factory=list)
    rows: list[fx.Node] = field(default_factory=list)
    sums: list[fx.Node] = field(default_factory=list)
    reads: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    needs_whole: dict[fx.Node, list[tuple[fx.Node, str]]] = field(default_factory=dict)
    readers: list[fx.Node] = field(default_factory=list)
    whole_too: set[fx.Node] = field(default_factory=set)


class RowFinder:
    """One walk over a graph. ``held``: the ``Rows`` of each node that can be held as rows, sources included.
    ``stretches``: what ``run`` found, in graph order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.held: dict[fx.Node, Rows] = {}
        self.stretches: list[Stretch] = []
        self._sources: dict[fx.Node, Source] = {}
        self._sums: list[fx.Node] = []
        self._reads: dict[fx.Node, dict[fx.Node, frozenset[fx.Node]]] = {}
        self._whole: dict[fx.Node, list[tuple[fx.Node, str]]] = {}
        self._same: dict[Any, SameValues] = {}
        self._whole_weights = WholeWeights(graph)

    def run(self) -> RowFinder:
        self._sources = find_sources(self.graph)
        for node in self.graph.nodes:
            if node in self._sources:
                first = self._sources[node].collectives[0]
                shape = tools.shape(node)
                lead = len(shape) - 1
                tokens = Tokens(first.group_name, first.world_size, tools.numel(shape[:lead]))
                self.held[node] = Rows(tokens, lead)
            elif any(i in self.held for i in node.all_input_nodes):
                self._visit(node)
        self.stretches = self._stretches()
        return self

    def _visit(self, node: fx.Node) -> None:
        try:
            if node.op != "call_function":
                raise NotRowWise("it is a result of the graph")
            if reduces_tokens(node, self.held):
                self._sums.append(node)
                return
            rows = self._rows(node)
            self._reads[node] = self._others(node, rows)
        except NotRowWise as error:
            for source in node.all_input_nodes:
                if source in self.held:
                    self._whole.setdefault(source, []).append((node, str(error)))
            return
        self.held[node] = rows

    def _rows(self, node: fx.Node) -> Rows:
        """How the result of ``node`` is held. Raises ``NotRowWise`` if ``node`` needs all rows."""
        if self._whole_weights.of(node):
            return self._whole_weights.rows(node, self.held)
        rule = rule_of(node)
        if rule is None:
            raise NotRowWise(f"{node.target} is not computed row by row")
        return rule.held(node, self.held)

    def _others(self, node: fx.Node, rows: Rows) -> dict[fx.Node, frozenset[fx.Node]]:
        """For each tensor that ``node`` reads and that is not held as rows, the graph's inputs from which it is
        computed. Raises ``NotRowWise`` if such a tensor, or a number in ``node``, may differ between ranks."""
        if tools.is_pointwise(node) or node.target is aten.full_like.default:
            _same_numbers(node, rows.tokens)
        known = (rows.tokens.group_name, frozenset(symbols_of(rows.tokens.count)))
        same = self._same.setdefault(known, SameValues(*known))
        found = {}
        for source in tools.tensor_inputs(node):
            if source in self.held:
                continue
            inputs = same.inputs_of(source)
            if inputs is None:
                raise NotRowWise(f"{node.name} reads {source.name}, which may differ between the ranks")
            found[source] = inputs
        return found

    def _stretches(self) -> list[Stretch]:
        sets = _DisjointSets(self.held)
        for node in self.held:
            sets.join(node, [i for i in node.all_input_nodes if i in self.held and node not in self._sources])
        found: dict[fx.Node, Stretch] = {}
        for node, rows in self.held.items():
            stretch = found.setdefault(sets.first(node), Stretch(rows.tokens))
            if node in self._sources:
                stretch.sources.append(self._sources[node])
            else:
                stretch.rows.append(node)
                stretch.reads.update(self._reads[node])
            if node in self._whole:
                stretch.needs_whole[node] = self._whole[node]
                stretch.readers += [user for user, _ in self._whole[node]]
        for node in self._sums:
            found[sets.first(node.all_input_nodes[0])].sums.append(node)
        return list(found.values())


def _same_numbers(node: fx.Node, tokens: Tokens) -> None:
    """Raise ``NotRowWise`` if a number in ``node`` may differ between ranks: it has a symbol that the number of tokens
    lacks."""
    known = symbols_of(tokens.count)
    for value in operators.leaves((node.args, node.kwargs)):
        number = tools.value(value) if isinstance(value, fx.Node) else value
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not symbols_of(number) <= known:
            raise NotRowWise(f"{node.name} computes with the number {number}, which may differ between the ranks")


def find_sources(graph: fx.Graph) -> dict[fx.Node, Source]:
    """The sources, by result. Each all-reduce has op ``sum`` and at least two dims. All-reduces of one group, shape and
    dtype whose results are only added to each other are one source. The gradient of a parameter has no tokens. So its
    all-reduce is no source if it is recognised (``is_weight_gradient``)."""
    found: dict[fx.Node, Source] = {}
    for _, kind, collective in find_collectives(graph):
        if kind == "all_reduce" and isinstance(collective, CollectiveNode) and collective.reduce_op == "sum":
            matrix = collective.world_size > 1 and len(tools.shape(collective.wait)) > 1
            if matrix and not is_weight_gradient(collective, "joint"):
                found[collective.wait] = Source(collective.wait, [collective])
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        terms = [found.get(a) for a in node.args]
        a, b = terms
        if a is None or b is None or a is b or any(len(t.result.users) > 1 for t in (a, b)):
            continue
        if a.collectives[0].group_name != b.collectives[0].group_name or not _alike(a.result, b.result, node):
            continue
        del found[a.result], found[b.result]
        found[node] = Source(node, [*a.collectives, *b.collectives], [*a.adds, *b.adds, node])
    return dict(sorted(found.items()))


def _alike(a: fx.Node, b: fx.Node, total: fx.Node) -> bool:
    return (
        tools.dtype(a) == tools.dtype(b) == tools.dtype(total) and tools.same_shape(a, b) and tools.same_shape(a, total)
    )


class _DisjointSets:
    """Disjoint sets of nodes. The first node of a set stands for it."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._parent = {n: n for n in nodes}

    def first(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, node: fx.Node, others: Iterable[fx.Node]) -> None:
        for other in others:
            a, b = self.first(node), self.first(other)
            earlier, later = (a, b) if a < b else (b, a)
            self._parent[later] = earlier


def gather_less(stretch: Stretch) -> None:
    """Gather the inputs of a node in place of its result if this moves fewer bytes. For a view, equal bytes suffice. A
    node whose inputs are gathered is computed with all rows. If a node on rows or a sum over tokens reads this node,
    this node is also computed on rows. Two examples of what is gathered::

        c = cast(x) to fp32; mm(c, w)               ->   gather x in place of c, and cast all rows
        three views of n, each read by a matmul     ->   gather n once, in place of the three views

    If a size is unbacked, nothing changes.
    """
    members = {s.result for s in stretch.sources} | set(stretch.rows)
    if any(tools.has_unbacked(tools.shape(n)) for n in members if tools.is_tensor(n)):
        return
    for node in sorted(stretch.rows, reverse=True):
        if node not in stretch.needs_whole:
            continue
        inputs = [i for i in node.all_input_nodes if i in members]
        if not all(map(tools.is_tensor, inputs)):
            # ``node`` is one of several results of an op, which would have to compute all of them with all rows.
            continue
        new = [i for i in inputs if i not in stretch.needs_whole]
        less = sum(map(_bytes, new)) - _bytes(node)
        if new and (less > 0 or (less == 0 and not tools.is_reshape(node))):
            continue
        del stretch.needs_whole[node]
        stretch.whole_too.add(node)
        for source in inputs:
            stretch.needs_whole.setdefault(source, []).append((node, "fewer bytes are gathered in front of it"))
    read = {i for n in (*stretch.rows, *stretch.sums) if n not in stretch.whole_too for i in n.all_input_nodes}
    for node in sorted(stretch.whole_too, reverse=True):
        if node in read:
            read.update(node.all_input_nodes)
    stretch.rows = [n for n in stretch.rows if n not in stretch.whole_too or n in read]


def _bytes(node: fx.Node) -> int:
    """Bytes of all rows of ``node``. A symbolic size counts as the number that ``hint`` returns."""
    return hint(tools.numel(tools.shape(node))) * tools.dtype(node).itemsize

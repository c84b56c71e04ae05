# SPDX-License-Identifier: Apache-2.0
"""Write some rows of a ``sites.grouped.GroupedMatmul``: the grouped matmul of these rows only.

The rows' places are sorted, which puts them into the experts' order. Place ``p`` belongs to the first expert whose end
is larger than ``p``. So in the piece, an expert's rows end at the number of places that are smaller than its end::

    ordered = sort(places[rows])
    y       = _grouped_mm(x[ordered], w, searchsorted(ordered, ends))
    out     = pointwise(y, shares[ordered], ...)[searchsorted(ordered, places[rows])]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.grouped import cut_by_rows
from overlap_inductor.sites.grouped import is_grouped
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
NODES = 10
"""Approximate number of nodes of a piece, besides the pointwise ops and the tensors that they read."""


@dataclass(frozen=True)
class _Shared:
    """What all pieces read: ``places`` and ``ends`` as in ``sites.grouped``, of one dtype, and the weights."""

    places: fx.Node
    ends: fx.Node
    weights: fx.Node


class GroupedRows:
    """Writes pieces of one grouped matmul. Nodes that all pieces share are written with the first piece."""

    def __init__(self, emit: StepEmitter, matmul: GroupedMatmul) -> None:
        self.emit, self.matmul = emit, matmul
        self._columns: dict[fx.Node, fx.Node] = {}

    @functools.cached_property
    def _shared(self) -> _Shared:
        emit, matmul = self.emit, self.matmul
        places = places_from_zero(emit, matmul)
        ends = emit.call(torch.ops.prims.convert_element_type.default, matmul.ends, tools.dtype(places))
        weights = matmul.rhs
        if _is_computed(weights):
            # Without this edge, Inductor may compute the weights again for each piece, for example a cast of all
            # weights.
            weights = emit.call(overlap.after.default, weights, emit.chain)
        return _Shared(places, ends, weights)

    def piece(self, cut: matmuls.Slicer, dim: int, after: fx.Node | None) -> fx.Node:
        """The rows that ``cut`` takes along dim ``dim`` of the result. ``after``: the token of the last send; the
        grouped matmul is ordered after it."""
        emit, matmul, shared = self.emit, self.matmul, self._shared
        mine = cut(shared.places, dim)
        flat = emit.reshape(mine, [tools.numel(tools.shape(mine))])
        ordered = emit.call(getitem, emit.call(aten.sort.default, flat), 0)
        ends = emit.call(aten.searchsorted.Tensor, ordered, shared.ends, out_int32=True)
        lhs = emit.call(aten.index.Tensor, matmul.lhs, [ordered])
        if after is not None:
            # Without this edge, one kernel may gather the rows of all pieces before the first send.
            lhs = emit.call(overlap.after.default, lhs, after)
        done = {matmul.lhs: lhs, matmul.rhs: shared.weights, matmul.ends: ends}
        for node in matmul.inner:
            if node is matmul.index:
                break
            read = done if is_grouped(node) else self._rows_read(node, done, ordered)
            done[node] = emit.annotate(emit.graph.node_copy(node, lambda n: read.get(n, n)))  # noqa: B023
        back = emit.call(aten.searchsorted.Tensor, ordered, mine)
        return emit.call(aten.index.Tensor, done[matmul.index.args[0]], [back])

    def _rows_read(self, node: fx.Node, done: dict[fx.Node, fx.Node], ordered: fx.Node) -> dict[fx.Node, fx.Node]:
        """The rows ``ordered`` of each tensor that ``node`` reads row by row."""
        rows = tools.shape(node)[0]
        found = {}
        for source in tools.tensor_inputs(node):
            if source in self.matmul.inner:
                found[source] = done[source]
            elif cut_by_rows(source, rows):
                found[source] = self.emit.call(aten.index.Tensor, self._computed_once(source), [ordered])
        return found

    def _computed_once(self, node: fx.Node) -> fx.Node:
        """``node``. If it is one column, it is written to memory once. Without this, each piece might compute the whole
        column again, for example the softmax of the router."""
        if not same_size(tools.shape(node)[1], 1):
            return node
        if node not in self._columns:
            self._columns[node] = self.emit.call(overlap.packed.default, node)
        return self._columns[node]


def _is_computed(node: fx.Node) -> bool:
    """False if ``node`` is an input or a constant of the graph, or a view of one; else true."""
    while True:
        piece = piece_of(node)
        if piece is not None:
            node = piece.base
        elif tools.is_reshape(node) or tools.permutation(node) is not None or node.target is aten.select.int:
            node = node.args[0]
        else:
            return node.op == "call_function"


def places_from_zero(emit: StepEmitter, matmul: GroupedMatmul) -> fx.Node:
    """The places of a grouped matmul's rows, in the shape of these rows. None of them is negative."""
    places, rows = matmul.places, matmul.index.args[0]
    if not matmul.counts_from_zero:
        from_end = emit.call(aten.add.Tensor, places, emit.call(aten.sym_size.int, rows, 0))
        places = emit.call(aten.where.self, emit.call(aten.lt.Scalar, places, 0), from_end, places)
    return emit.reshape(places, tools.shape(matmul.node)[:-1])

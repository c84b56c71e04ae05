# SPDX-License-Identifier: Apache-2.0
"""Write some rows of a ``sites.grouped.GroupedMatmul``: the grouped matmul of these rows only.

The rows' places are sorted, which puts them into the experts' order. Place ``p`` belongs to the first expert whose end
is larger than ``p``. So the ends of the piece's experts are the numbers of its places below the ends of all rows::

    ordered = sort(places[rows])
    y       = _grouped_mm(x[ordered], w, searchsorted(ordered, ends))
    out     = pointwise(y, shares[ordered], ...)[searchsorted(ordered, places[rows])]
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.grouped import cut_by_rows
from overlap_inductor.sites.grouped import is_grouped
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
NODES = 10
"""About the number of nodes of a piece, besides the pointwise ops and the tensors that they read."""


class GroupedRows:
    """Writes pieces of one grouped matmul. What all pieces share is written at the first one."""

    def __init__(self, emit: StepEmitter, matmul: GroupedMatmul) -> None:
        self.emit, self.matmul = emit, matmul
        self._shared: tuple[fx.Node, fx.Node] | None = None
        self._columns: dict[fx.Node, fx.Node] = {}

    def piece(self, cut: matmuls.Slicer, dim: int, after: fx.Node | None) -> fx.Node:
        """The rows that ``cut`` takes along dim ``dim`` of the result. ``after``: the token of the last send; the
        grouped matmul is ordered after it."""
        emit, matmul = self.emit, self.matmul
        places, ends = self._shared or self._prepare()
        mine = cut(places, dim)
        flat = emit.reshape(mine, [tools.numel(tools.shape(mine))])
        ordered = emit.call(getitem, emit.call(aten.sort.default, flat), 0)
        done: dict[fx.Node, fx.Node] = {}

        def rows_of(node: Any) -> Any:
            if node in done or not tools.is_tensor(node):
                return done.get(node, node)
            by_rows = cut_by_rows(node, tools.shape(matmul.index.args[0])[0])
            return emit.call(aten.index.Tensor, self._computed_once(node), [ordered]) if by_rows else node

        for node in matmul.inner:
            if is_grouped(node):
                counts = emit.call(aten.searchsorted.Tensor, ordered, ends, out_int32=True)
                operands = {node.args[0]: rows_of(node.args[0]), matmul.ends: counts}
                copied = emit.graph.node_copy(node, lambda n: operands.get(n, n))  # noqa: B023  (called at once)
                result = emit.annotate(copied)
                done[node] = result if after is None else emit.call(overlap.after.default, result, after)
            elif node is matmul.index:
                break
            else:
                done[node] = emit.annotate(emit.graph.node_copy(node, rows_of))
        back = emit.call(aten.searchsorted.Tensor, ordered, mine)
        return emit.call(aten.index.Tensor, done[matmul.index.args[0]], [back])

    def _computed_once(self, node: fx.Node) -> fx.Node:
        """``node``, in memory if it is one column. Otherwise each piece may compute all of it, for example the softmax
        of the router."""
        if not same_size(tools.shape(node)[1], 1):
            return node
        if node not in self._columns:
            self._columns[node] = self.emit.call(overlap.packed.default, node)
        return self._columns[node]

    def _prepare(self) -> tuple[fx.Node, fx.Node]:
        places = places_from_zero(self.emit, self.matmul)
        ends = self.emit.call(torch.ops.prims.convert_element_type.default, self.matmul.ends, tools.dtype(places))
        self._shared = places, ends
        return self._shared


def places_from_zero(emit: StepEmitter, matmul: GroupedMatmul) -> fx.Node:
    """The places of a grouped matmul's rows in the shape of its rows, none of them negative."""
    places, rows = matmul.places, matmul.index.args[0]
    if not matmul.counts_from_zero:
        from_end = emit.call(aten.add.Tensor, places, emit.call(aten.sym_size.int, rows, 0))
        places = emit.call(aten.where.self, emit.call(aten.lt.Scalar, places, 0), from_end, places)
    return emit.reshape(places, tools.shape(matmul.node)[:-1])

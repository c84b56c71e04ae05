# SPDX-License-Identifier: Apache-2.0
"""Write a piece of a ``sites.grouped.GroupedMatmul``: its steps for some of its rows only.

A row's place is its position in the experts' order. Expert e's places end at ``ends[e]``. The piece consists of the
rows ``rows`` of the result. Row ``tokens[p]`` of ``x`` belongs to place p, and so does row p of ``shares``::

    ordered = sort(places[rows])                              # the piece's rows in the experts' order
    ends'   = searchsorted(ordered, ends)                     # where each expert's rows end in the piece
    h       = activation(_grouped_mm(x[tokens[ordered]], w0, ends'))
    y       = _grouped_mm(h, w1, ends')
    out     = pointwise(y, shares[ordered], ...)[searchsorted(ordered, places[rows])]
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.sites.row_steps import cut_by_rows
from overlap_inductor.sites.row_steps import is_gather
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
NODES = 10
"""Approximate number of nodes of a piece, besides the steps."""


@dataclass(frozen=True)
class _Shared:
    """What all pieces read. ``places`` and ``ends`` (``sites.grouped``) have the same dtype. ``weights``: ``{right
    operand of a _grouped_mm: the node that the pieces read instead}``."""

    places: fx.Node
    ends: fx.Node
    weights: dict[fx.Node, fx.Node]


class GroupedRows:
    """Writes pieces of one grouped matmul. The first piece writes the nodes that all pieces share."""

    def __init__(self, emit: StepEmitter, matmul: GroupedMatmul) -> None:
        self.emit, self.matmul = emit, matmul
        self._once: dict[fx.Node, fx.Node] = {}

    @functools.cached_property
    def _steps(self) -> list[fx.Node]:
        return self.matmul.steps

    @functools.cached_property
    def _shared(self) -> _Shared:
        emit, matmul = self.emit, self.matmul
        places = places_from_zero(emit, matmul)
        ends = emit.call(torch.ops.prims.convert_element_type.default, matmul.ends, tools.dtype(places))
        weights = {}
        for rhs in (n.args[1] for n in self._steps if is_grouped(n)):
            # Without this edge, Inductor may compute the weights (a cast, for example) again for each piece.
            weights[rhs] = emit.call(overlap.after.default, rhs, emit.chain) if _is_computed(rhs) else rhs
        return _Shared(places, ends, weights)

    def piece(self, cut: matmuls.Slicer, dim: int, after: fx.Node | None) -> fx.Node:
        """The rows that ``cut`` takes along dim ``dim`` of the result. ``after``: the token of
        the send that stands before this piece, if there is one. The rows are computed after this send."""
        emit, matmul, shared = self.emit, self.matmul, self._shared
        mine = cut(shared.places, dim)
        flat = emit.reshape(mine, [tools.numel(tools.shape(mine))])
        ordered = emit.call(getitem, emit.call(aten.sort.default, flat), 0)
        if after is not None:
            # Without this edge, one kernel may gather the rows of all pieces before the first send.
            ordered = emit.call(overlap.after.default, ordered, after)
        ends = emit.call(aten.searchsorted.Tensor, ordered, shared.ends, out_int32=True)
        done: dict[fx.Node, fx.Node] = {}
        for node in self._steps:
            if is_gather(node):
                rows = emit.call(aten.index.Tensor, self._computed_once(node.args[1][0]), [ordered])
                done[node] = emit.call(aten.index.Tensor, node.args[0], [rows])
                continue
            read = {**shared.weights, matmul.ends: ends} if is_grouped(node) else {}
            read |= self._rows_read(node, done, ordered, read)
            done[node] = emit.annotate(emit.graph.node_copy(node, lambda n: read.get(n, n)))  # noqa: B023
        back = emit.call(aten.searchsorted.Tensor, ordered, mine)
        return emit.call(aten.index.Tensor, done[matmul.index.args[0]], [back])

    def _rows_read(
        self, node: fx.Node, done: dict[fx.Node, fx.Node], ordered: fx.Node, known: Container[fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """``{tensor: tensor[ordered]}`` for each tensor that ``node`` reads row by row, except the tensors in
        ``known``. Entries that ``done`` lacks are added to it."""
        found = {}
        for source in (n for n in node.all_input_nodes if n not in known):
            if source not in done and tools.is_tensor(source) and cut_by_rows(source, self._row_count):
                done[source] = self.emit.call(aten.index.Tensor, self._computed_once(source), [ordered])
            if source in done:
                found[source] = done[source]
        return found

    @property
    def _row_count(self) -> Size:
        return tools.shape(self.matmul.index.args[0])[0]

    def _computed_once(self, node: fx.Node) -> fx.Node:
        """Returns ``node``, or a copy of it in memory if it is a vector or a single column. Without this copy, each
        piece might compute all of ``node`` again."""
        shape = tools.shape(node)
        if len(shape) > 1 and not same_size(shape[1], 1):
            return node
        if node not in self._once:
            self._once[node] = self.emit.call(overlap.packed.default, node)
        return self._once[node]


def _is_computed(node: fx.Node) -> bool:
    """Whether ``node`` is computed: neither an input or constant of the graph, nor a view of one."""
    while True:
        piece = piece_of(node)
        if piece is not None:
            node = piece.base
        elif tools.is_reshape(node) or tools.permutation(node) is not None or node.target is aten.select.int:
            node = node.args[0]
        else:
            return node.op == "call_function"


def places_from_zero(emit: StepEmitter, matmul: GroupedMatmul) -> fx.Node:
    """The places of a grouped matmul's rows, in the shape of the leading dims of its result. No place is negative."""
    places = matmul.places
    if not matmul.counts_from_zero:
        rows = tools.shape(matmul.index.args[0])[0]
        count = rows if isinstance(rows, int) else emit.call(aten.sym_size.int, _with_rows(matmul), 0)
        from_end = emit.call(aten.add.Tensor, places, count)
        places = emit.call(aten.where.self, emit.call(aten.lt.Scalar, places, 0), from_end, places)
    return emit.reshape(places, tools.shape(matmul.node)[:-1])


def _with_rows(matmul: GroupedMatmul) -> fx.Node:
    """A tensor with one entry for each row. The steps read this tensor but do not compute it. If the size of a
    step's result were read, the step would stay in the graph and compute all rows."""
    steps, last = matmul.steps, matmul.index.args[0]
    for node in steps:
        if is_gather(node):
            return node.args[1][0]
        for source in tools.tensor_inputs(node):
            if source not in steps and cut_by_rows(source, tools.shape(last)[0]):
                return source
    raise RuntimeError(f"{last.name} is computed from no tensor that has its rows")

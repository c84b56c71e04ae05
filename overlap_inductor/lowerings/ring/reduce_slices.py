# SPDX-License-Identifier: Apache-2.0
"""Write the nodes that compute a slice of a collective's input, from slices of the matmuls' operands::

    t = add(mm(x, w), mm(y, v))        ->        slice i: addmm(mm(x[i], w), y[i], v)

A slice is the part of the input that goes to one rank, a piece of such a part, or some rows of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_pieces import annotate_new
from overlap_inductor.lowerings.ring.grouped_rows import GroupedRows
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.reduce_nodes import Region
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor

Cuts = dict[int, matmuls.Slicer]
"""For each dim that is cut, the function that cuts it. Dims are those of the matmuls' result or, with a ``Region``, of
``Region.layout``."""


class Slices:
    """Computes slices of the collective's input, in the matmuls' own layout. Attribute ``after`` is the token of the
    last send. The next matmul runs after this send."""

    def __init__(self, emit: StepEmitter, nodes: ReduceNodes) -> None:
        self.emit, self.nodes = emit, nodes
        self.after: fx.Node | None = None
        self.whole: dict[fx.Node, fx.Node] = {}
        self.grouped: dict[fx.Node, GroupedRows] = {
            m.node: GroupedRows(emit, m) for m in nodes.leaves if isinstance(m, GroupedMatmul)
        }

    def of_rank(self, shift: int, block: Block, rows: tuple[Size, Size] | None = None) -> fx.Node:
        """``block`` of the slice of rank ``r + shift``, where ``r`` is this rank. ``rows``: ``(start, length)`` in
        dim 0 of the matmuls' result, if another dim is sliced; ``None`` for all rows."""
        sharded = self.nodes.sharded
        cuts: Cuts = {sharded.dim: lambda x, dim: self.emit.take_sharded(x, dim, sharded, shift, block)}
        if rows is not None:
            cuts[0] = lambda x, dim: self.emit.narrow(x, dim, *rows)
        return self._compute(cuts)

    def of_ranks(self, shifts: Sequence[int], block: Block) -> fx.Node:
        """``of_rank`` for each of ``shifts``, one after the other. Each matmul computes all of them at once, from a
        copy of its operand's rows. The matmuls are ``mm`` or ``addmm``, their rows are scattered, and
        ``sharded.outer`` is 1."""
        chunk = self.nodes.sharded.chunk

        def rows(x: fx.Node, dim: int) -> fx.Node:
            copied = self.emit.take_ranks(x, dim, shifts, chunk, block.start, block.length)
            # Without this edge Inductor may make the copies for all matmuls before the first send.
            return copied if self.after is None else self.emit.call(overlap.after.default, copied, self.after)

        return self._compute({0: rows})

    def rows(self, start: Size, length: Size) -> fx.Node:
        return self._compute({self.nodes.sharded.dim: lambda x, dim: self.emit.narrow(x, dim, start, length)})

    def _compute(self, cuts: Cuts) -> fx.Node:
        done: dict[fx.Node, fx.Node] = {}
        first, *others = self.nodes.computed
        total = self._evaluate(first, cuts, done)
        for node in others:
            total = self._multiplied_onto(total, node, cuts) or self.emit.call(
                aten.add.Tensor, total, self._evaluate(node, cuts, done)
            )
        expected = tools.dtype(self.nodes.collectives[0].input)
        if tools.dtype(total) != expected:
            raise RuntimeError(f"a piece was computed as {tools.dtype(total)}; expected the collective's {expected}")
        if self.nodes.region is not None:
            summed = {d for dims in self.nodes.region.reduced.values() for d in dims}
            total = self.emit.reshape(total, [size for d, size in enumerate(tools.shape(total)) if d not in summed])
        if self.nodes.padding is not None and self.nodes.padding.columns:
            total = self.emit.call(aten.constant_pad_nd.default, total, [0, self.nodes.padding.columns])
        return self.in_memory(total)

    def _sum_of_matmuls(self, node: fx.Node, cuts: Cuts, done: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """A slice of ``node``, if ``node`` adds a matmul to another matmul or to a sum of matmuls; else ``None``."""
        if node.target is not aten.add.Tensor or node.kwargs:
            return None
        if not all(tools.is_tensor(n) and tools.same_shape(n, node) for n in node.args):
            return None
        left, right = node.args
        if left is right:
            return None  # ``addmm`` would multiply the same operands a second time.
        for term, added in ((left, right), (right, left)):
            if self._added(added) is None:
                continue
            total = self._multiplied_onto(self._evaluate(term, cuts, done), added, cuts)
            if total is not None:
                return total
        return None

    def _multiplied_onto(self, total: fx.Node, node: fx.Node, cuts: Cuts) -> fx.Node | None:
        """``total``, a matmul's result, plus the slice of ``node``: ``addmm(total, x[i], w)``. ``None`` if ``node`` is
        not a plain ``mm``, if ``total`` is not a matmul's result, or if their dtypes differ.

        This saves the addition's kernel, and a sum in bf16 or fp16 is rounded once less. The matmul reads ``total``, so
        it needs no edge of its own to the last send. In plain graphs, Inductor's post-grad pass (pattern ``addmm``)
        does the same to ``mm + mm``. It does not if a view stands between matmul and addition, as in the backward of
        3-D linear layers. Slices have no such views.
        """
        computed = total.args[0] if total.target is overlap.after.default else total
        leaf = self._added(node)
        if leaf is None or computed.target not in (aten.mm.default, aten.addmm.default):
            return None
        if tools.dtype(total) != tools.dtype(leaf.node):
            return None
        return self.emit.call(aten.addmm.default, total, *self._operands(leaf, cuts))

    def _added(self, node: fx.Node) -> matmuls.MatmulNode | None:
        """The ``mm`` of which ``node`` is the result or a view. ``None`` if there is none, or it has other readers."""
        nodes = self.nodes
        while node in nodes.through and len(node.users) == 1:
            node = nodes.through[node]
        if nodes.region is not None or node.target is not aten.mm.default or len(node.users) != 1:
            return None
        return next((m for m in nodes.leaves if m.node is node), None)

    def in_memory(self, piece: fx.Node) -> fx.Node:
        """Returns ``piece`` as a tensor that is written to memory only once. If it were computed again, the op that
        waits for the piece's hop could get this second tensor. The op would then keep only the second tensor alive, and
        the memory that is being sent could be reused."""
        if piece.target is overlap.after.default or piece.target in matmuls.KINDS:
            return piece  # Inductor never inlines a matmul into the kernel that reads it.
        return self.emit.call(overlap.after.default, piece, self.after or self.emit.chain)

    def _evaluate(self, node: fx.Node, cuts: Cuts, done: dict[fx.Node, fx.Node]) -> fx.Node:
        if node in done:
            return done[node]
        emit, nodes = self.emit, self.nodes
        leaf = next((m for m in nodes.leaves if m.node is node), None)
        if node in self.grouped and nodes.region is not None:
            (cut,) = cuts.values()
            result = self.grouped[node].piece(cut, nodes.region.cut, self.after)
        elif leaf is not None:
            lhs, rhs = self._operands(leaf, cuts)
            added = leaf.bias if nodes.bias_of(leaf) is None else None
            bias = None if added is None else self._evaluate(added, cuts, done)
            result = matmuls.emit(emit.graph, leaf, lhs, rhs, self._slicers(leaf, cuts), bias_slice=bias)
            annotate_new(emit, result)
            if self.after is not None:
                # Without this edge, Inductor may run all matmuls before the first send.
                result = emit.call(overlap.after.default, result, self.after)
        elif node in nodes.through or (node.target in tools.SAME and node not in nodes.externals):
            # A view, or a copy that is not needed: matmuls and pointwise ops write each slice to new memory.
            result = self._evaluate(nodes.through.get(node, node.args[0]), cuts, done)
        elif node in nodes.externals:
            result = self._external(node, cuts) if nodes.region is None else self._placed(node, nodes.region, cuts)
        elif nodes.region is not None and node in nodes.region.reduced:
            source = self._evaluate(node.args[0], cuts, done)
            kind = {name: value for name, value in node.kwargs.items() if name == "dtype"}
            result = emit.call(node.target, source, nodes.region.reduced[node], True, **kind)
        elif nodes.region is not None and node in nodes.region.joined:
            parts = [self._evaluate(n, cuts, done) for n in node.args[0]]
            result = emit.call(aten.cat.default, parts, nodes.region.joined[node])
        elif (summed := self._sum_of_matmuls(node, cuts, done)) is not None:
            result = summed
        else:
            result = emit.annotate(
                emit.graph.node_copy(node, lambda n: self._evaluate(n, cuts, done) if tools.is_tensor(n) else n)
            )
        done[node] = result
        return result

    def _slicers(self, leaf: matmuls.MatmulNode, cuts: Cuts) -> dict[str, matmuls.Slicer]:
        nodes = self.nodes
        return {nodes.role if d == nodes.sharded.dim else leaf.output_role(d): cut for d, cut in cuts.items()}

    def _operands(self, leaf: matmuls.MatmulNode, cuts: Cuts) -> tuple[fx.Node, fx.Node]:
        slicers = self._slicers(leaf, cuts)
        return self._operand(leaf, "lhs", slicers), self._operand(leaf, "rhs", slicers)

    def _operand(self, leaf: matmuls.MatmulNode, side: str, slicers: dict[str, matmuls.Slicer]) -> fx.Node:
        operand = leaf.lhs if side == "lhs" else leaf.rhs
        for role, cut in slicers.items():
            dim = leaf.operand_dim(side, role)
            if dim is not None:
                operand = cut(self._whole(operand, dim) if role == self.nodes.role else operand, dim)
        return operand

    def _whole(self, operand: fx.Node, dim: int) -> fx.Node:
        if operand not in self.whole:
            self.whole[operand] = self.emit.whole_chunks(operand, dim, self.nodes.sharded)
        return self.whole[operand]

    def _placed(self, node: fx.Node, region: Region, cuts: Cuts) -> fx.Node:
        """``node``, which the region reads but does not compute, laid out over the matmuls' dims. If it has the cut
        dim, it is cut."""
        if not tools.shape(node):
            return node
        place = region.places[node]
        placed = self.emit.convert(node, self.nodes.layouts[node], place)
        (cut,) = cuts.values()
        return cut(placed, region.cut) if place.dims[region.cut] else placed

    def _external(self, node: fx.Node, cuts: Cuts) -> fx.Node:
        shape = tools.shape(node)
        leaf = tools.shape(self.nodes.leaves[0].node)
        if not shape or tools.is_scalar_like(node):
            # For type promotion, a tensor of one element must keep a dim. Without dims, it counts as a scalar.
            return self.emit.reshape(node, [1]) if len(shape) > 1 else node
        if self.nodes.layouts[node].same_elements(self.nodes.leaf_layout):
            piece = self.emit.reshape(node, leaf)
            for dim, cut in cuts.items():
                piece = cut(piece, dim)
            return piece
        vector = self.emit.reshape(node, [shape[-1]])
        return cuts[len(leaf) - 1](vector, 0) if len(leaf) - 1 in cuts else vector

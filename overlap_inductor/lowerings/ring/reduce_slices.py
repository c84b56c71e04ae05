# SPDX-License-Identifier: Apache-2.0
"""Compute slices of what a matmul, or a sum of matmuls, sends: the slice of a rank, or some rows of it.

A slice is computed from the slices of the matmuls' operands, through the views and pointwise ops of the site's region::

    t = add(mm(x, w), mm(y, v))        ->        slice i: add(mm(x[i], w), mm(y[i], v))
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_pieces import annotate_new
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.reduce_nodes import Region
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


class Slices:
    """Computes slices of the collective's input, in the matmuls' own layout. ``after``: the token of the last send; the
    next matmul is ordered after it."""

    def __init__(self, emit: StepEmitter, nodes: ReduceNodes) -> None:
        self.emit, self.nodes = emit, nodes
        self.after: fx.Node | None = None
        self.whole: dict[fx.Node, fx.Node] = {}

    def of_rank(self, shift: int, block: Block) -> fx.Node:
        sharded = self.nodes.sharded
        return self._compute(lambda x, dim: self.emit.take_sharded(x, dim, sharded, shift, block))

    def rows(self, start: Size, length: Size) -> fx.Node:
        return self._compute(lambda x, dim: self.emit.narrow(x, dim, start, length))

    def _compute(self, cut: matmuls.Slicer) -> fx.Node:
        done: dict[fx.Node, fx.Node] = {}
        pieces = [self._evaluate(node, cut, done) for node in self.nodes.computed]
        total = pieces[0]
        for piece in pieces[1:]:
            total = self.emit.call(aten.add.Tensor, total, piece)
        expected = tools.dtype(self.nodes.collectives[0].input)
        if tools.dtype(total) != expected:
            raise RuntimeError(f"a piece was computed as {tools.dtype(total)}; expected the collective's {expected}")
        if self.nodes.region is not None:
            summed = {d for dims in self.nodes.region.reduced.values() for d in dims}
            total = self.emit.reshape(total, [size for d, size in enumerate(tools.shape(total)) if d not in summed])
        if self.nodes.padding is not None and self.nodes.padding.columns:
            total = self.emit.call(aten.constant_pad_nd.default, total, [0, self.nodes.padding.columns])
        return self.in_memory(total)

    def in_memory(self, piece: fx.Node) -> fx.Node:
        """``piece``, written to memory once. Otherwise Inductor could compute a cheap ``piece`` a second time for the
        op that waits for its hop. That op would keep the second copy alive, and the memory that is being sent could be
        reused."""
        if piece.target is overlap.after.default or piece.target in matmuls.KINDS:
            return piece  # Inductor never inlines a matmul into the kernel that reads it.
        return self.emit.call(overlap.after.default, piece, self.after or self.emit.chain)

    def _evaluate(self, node: fx.Node, cut: matmuls.Slicer, done: dict[fx.Node, fx.Node]) -> fx.Node:
        if node in done:
            return done[node]
        emit, nodes = self.emit, self.nodes
        leaf = next((m for m in nodes.leaves if m.node is node), None)
        if leaf is not None:
            role = nodes.role
            lhs_dim, rhs_dim = leaf.operand_dim("lhs", role), leaf.operand_dim("rhs", role)
            lhs = cut(self._whole(leaf.lhs, lhs_dim), lhs_dim) if lhs_dim is not None else leaf.lhs
            rhs = cut(self._whole(leaf.rhs, rhs_dim), rhs_dim) if rhs_dim is not None else leaf.rhs
            added = leaf.bias if nodes.bias_of(leaf) is None else None
            bias = None if added is None else self._evaluate(added, cut, done)
            result = matmuls.emit(emit.graph, leaf, lhs, rhs, {role: cut}, bias_slice=bias)
            annotate_new(emit, result)
            if self.after is not None:
                # Without this edge Inductor may run all matmuls before the first send, or all sends last.
                result = emit.call(overlap.after.default, result, self.after)
        elif node in nodes.through:
            result = self._evaluate(nodes.through[node], cut, done)
        elif node in nodes.externals:
            result = self._external(node, cut) if nodes.region is None else self._placed(node, nodes.region, cut)
        elif nodes.region is not None and node in nodes.region.reduced:
            source = self._evaluate(node.args[0], cut, done)
            kind = {name: value for name, value in node.kwargs.items() if name == "dtype"}
            result = emit.call(node.target, source, nodes.region.reduced[node], True, **kind)
        elif nodes.region is not None and node in nodes.region.joined:
            parts = [self._evaluate(n, cut, done) for n in node.args[0]]
            result = emit.call(aten.cat.default, parts, nodes.region.joined[node])
        else:
            result = emit.annotate(
                emit.graph.node_copy(node, lambda n: self._evaluate(n, cut, done) if tools.is_tensor(n) else n)
            )
        done[node] = result
        return result

    def _whole(self, operand: fx.Node, dim: int) -> fx.Node:
        if operand not in self.whole:
            self.whole[operand] = self.emit.whole_chunks(operand, dim, self.nodes.sharded)
        return self.whole[operand]

    def _placed(self, node: fx.Node, region: Region, cut: matmuls.Slicer) -> fx.Node:
        """``node``, a tensor that the region reads but does not compute, laid out over the matmuls' dims. If it has the
        dim that is cut, it is cut."""
        if not tools.shape(node):
            return node
        place = region.places[node]
        placed = self.emit.convert(node, self.nodes.layouts[node], place)
        return cut(placed, region.cut) if place.dims[region.cut] else placed

    def _external(self, node: fx.Node, cut: matmuls.Slicer) -> fx.Node:
        shape = tools.shape(node)
        leaf = tools.shape(self.nodes.leaves[0].node)
        if not shape or tools.is_scalar_like(node):
            # In type promotion, a tensor of one element with dims counts as a tensor, and one without dims as a scalar.
            # So one dim is kept if there are any.
            return self.emit.reshape(node, [1]) if len(shape) > 1 else node
        if self.nodes.layouts[node].same_elements(self.nodes.leaf_layout):
            return cut(self.emit.reshape(node, leaf), self.nodes.sharded.dim)
        vector = self.emit.reshape(node, [shape[-1]])
        return cut(vector, 0) if self.nodes.sharded.dim == len(leaf) - 1 else vector

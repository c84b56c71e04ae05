# SPDX-License-Identifier: Apache-2.0
"""Write the matmuls that read a gathered tensor, and their epilogue, for one piece of the tensor at a time.

The caller brings this rank's own shard first. The shard comes as a whole, or in sub-chunks if the caller is module
``lowerings.ring.unrolled_bands``. The caller may bring the other pieces in any order. The gathered dim is dim B
(batch), M, N or K of the matmul. This rank is rank ``r``. For the shard of rank ``r + shift``, or a part of it, these
nodes are written::

    operand = f(piece)                       # the nodes between the collective and the matmul
    y[r + shift][part] = operand @ w         # B, M or N gathered: ``assemble`` joins the pieces of y
    total += operand @ w[r + shift]          # K gathered: accumulated in fp32

One matmul may multiply the same part of several ranks' shards (``Consumer.multiply_together``). Their rows are copied
to one tensor by op ``take_ranks``. The product's rows are copied to their places in ``y`` by op ``place_ranks``, and
``y`` then has no ``assemble``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_cuts import axis_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.gather_nodes import Epilogue
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor

JOINABLE = ("mm", "addmm")
"""Kinds of matmuls (``MatmulNode.kind``) that may multiply the rows of several ranks at once."""


@dataclass(frozen=True)
class Piece:
    """A part of a consumer's output. ``node`` holds rows of one or more shards: first those of rank ``r + shifts[0]``,
    then those of rank ``r + shifts[1]``, and so on. The part's place in each shard: ``block`` along the gathered dim,
    ``cross_start`` along the crossing dim (``Consumer``)."""

    node: fx.Node
    shifts: tuple[int, ...]
    block: Block
    cross_start: Size


class Consumer:
    """Writes the matmuls of one ``GatherConsumer``, one for each piece. If sub-chunks cut a dim of the operand other
    than the gathered one, that dim is the *crossing dim*."""

    def __init__(self, emit: StepEmitter, consumer: GatherConsumer, lead: Atom | None) -> None:
        self.emit, self.consumer = emit, consumer
        self.axis = axis_of(consumer, lead) if lead is not None else None
        self.pieces: list[Piece] = []
        self.totals: dict[int, fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}

    def block(self, start: Size, length: Size) -> tuple[Block, Size, Size | None]:
        """``(block along the gathered dim, start in the crossing dim, length there)`` of a sub-chunk. The length is
        ``None`` without a crossing dim."""
        whole = Block.whole(self.consumer.sharded)
        if self.axis is None:
            return whole, 0, None
        kind, _, unit = self.axis
        if kind == "chunk":
            return Block(start * unit, length * unit, 0, whole.outer_length), 0, None
        if kind == "outer":
            return Block(0, whole.length, start * unit, length * unit), 0, None
        return whole, start * unit, length * unit

    def multiply(self, operand: fx.Node, shift: int, part: int | None, start: Size, length: Size) -> None:
        consumer, emit = self.consumer, self.emit
        matmul, sharded, role = consumer.matmul, consumer.sharded, consumer.role
        block, cross_start, cross_length = (
            self.block(start, length) if part is not None else (Block.whole(sharded), 0, None)
        )
        cross_role = matmul.role(consumer.operand, self.axis[1]) if self.axis and self.axis[0] == "cross" else None
        side = "rhs" if consumer.operand == "lhs" else "lhs"
        along: Any = matmul.operand_dim(side, "K")
        other = consumer.other_node if role != "K" else self._whole(consumer.other_node, along)
        slicers: dict[str, matmuls.Slicer] = {}
        if cross_length is not None and cross_role is not None:
            slicers[cross_role] = lambda x, dim: emit.narrow(x, dim, cross_start, cross_length)
            if cross_role == "B":
                other = emit.narrow(other, 0, cross_start, cross_length)
        if role != "K":
            slicers[role] = lambda x, dim: emit.take_sharded(self._whole(x, dim), dim, sharded, shift, block)
            if role == "B":
                other = emit.take_sharded(self._whole(other, 0), 0, sharded, shift, block)
        else:
            other = emit.take_sharded(other, along, sharded, shift, block)
            operand = emit.without_padding(operand, sharded, shift, block)
        lhs, rhs = (operand, other) if consumer.operand == "lhs" else (other, operand)
        if role != "K":
            piece = matmuls.emit(emit.graph, matmul, lhs, rhs, slicers)
            annotate_new(emit, piece)
            self.pieces.append(Piece(piece, (shift,), block, cross_start))
            return
        # Without a crossing dim, ``totals[-1]`` adds up all pieces. With a crossing dim, ``totals[part]`` adds up
        # sub-chunk ``part`` of every shard. If the own shard comes as a whole, its product is ``totals[-1]``. Then
        # ``totals[part]`` starts as a slice of ``totals[-1]``: sub-chunk ``part`` along the crossing dim.
        band = part if cross_length is not None and part is not None else -1
        total = self.totals.get(band)
        if total is None and band >= 0 and -1 in self.totals:
            dim = matmul.output_dim(cross_role)  # type: ignore[arg-type]
            total = emit.narrow(self.totals[-1], dim, cross_start, cross_length)
        node = matmuls.emit_partial(emit.graph, matmul, lhs, rhs, total)
        annotate_new(emit, node)
        self.totals[band] = node

    def multiply_together(self, operand: fx.Node, shifts: Sequence[int], start: Size, length: Size) -> fx.Node:
        """Like ``multiply`` for one sub-chunk of the shard of each rank ``r + shift``, with one matmul. Call this only
        if ``joins``.

        Args:
            operand: the sub-chunks' rows, one rank after the other.

        Returns:
            the product. If K is gathered: the sum so far.
        """
        consumer, emit = self.consumer, self.emit
        matmul, other, block = consumer.matmul, consumer.other_node, self.block(start, length)[0]

        def rows(x: fx.Node, dim: int) -> fx.Node:
            return emit.take_ranks(x, dim, shifts, consumer.sharded.chunk, block.start, block.length)

        if consumer.role == "K":
            along: Any = matmul.operand_dim("rhs" if consumer.operand == "lhs" else "lhs", "K")
            lhs, rhs = (operand, rows(other, along)) if consumer.operand == "lhs" else (rows(other, along), operand)
            node = matmuls.emit_partial(emit.graph, matmul, lhs, rhs, self.totals.get(-1))
            self.totals[-1] = node
        else:
            node = matmuls.emit(emit.graph, matmul, operand, other, {"M": rows})
            self.pieces.append(Piece(node, tuple(shifts), block, 0))
        annotate_new(emit, node)
        return node

    @property
    def joins(self) -> bool:
        """Whether one matmul may multiply a sub-chunk of several ranks' shards."""
        consumer, sharded = self.consumer, self.consumer.sharded
        rows = self.axis is not None and self.axis[0] == "chunk" and same_size(sharded.outer, 1) and not sharded.short
        role = consumer.role == "K" or (consumer.role == "M" and consumer.operand == "lhs")
        return rows and role and consumer.matmul.kind in JOINABLE

    def place(self, whole: fx.Node | None, piece: Piece) -> tuple[fx.Node, fx.Node]:
        """Copy a piece of an output of the matmul or of its epilogue to its places in the output. Call this only if
        ``joins``.

        Args:
            whole: the output; ``None`` before its first piece.

        Returns:
            ``(the output, a token of the copy)``.
        """
        emit, chunk, like = self.emit, self.consumer.sharded.chunk, tools.value(piece.node)
        if whole is None:
            shape = [emit.world_size * chunk, *tools.shape(piece.node)[1:]]
            whole = emit.call(aten.empty.memory_format, shape, dtype=like.dtype, device=like.device)
        where = (chunk, piece.block.start, piece.block.length, emit.group_name)
        return whole, emit.call(overlap.place_ranks.default, whole, piece.node, list(piece.shifts), *where)

    def _whole(self, x: fx.Node, dim: int) -> fx.Node:
        """``x`` with zeros for the rows that the last shards lack. ``dim``: the dim of ``x`` that corresponds
        to the gathered dim."""
        if x not in self.whole:
            self.whole[x] = self.emit.whole_chunks(x, dim, self.consumer.sharded)
        return self.whole[x]

    def finish(self) -> fx.Node:
        return self._sum() if self.consumer.role == "K" else self.assemble(self.pieces)

    def assemble(self, pieces: list[Piece]) -> fx.Node:
        """Join pieces of an output of the matmul or of its epilogue, to the shape of the matmul's output. Each piece is
        from one rank's shard."""
        matmul, emit = self.consumer.matmul, self.emit
        out_dim = matmul.output_dim(self.consumer.role)
        sharded = self.consumer.sharded
        shape = tools.shape(matmul.node)
        full = emit.world_size * sharded.chunk
        flat = isinstance(sharded.outer, int) and sharded.outer == 1
        split = [*shape[:out_dim], *([full] if flat else [sharded.outer, full]), *shape[out_dim + 1 :]]
        dim = out_dim if flat else out_dim + 1
        nodes, starts = [], []
        shifts: list[int] = []
        for part in pieces:
            piece, block = part.node, part.block
            start: list[Size] = [0] * len(split)
            start[dim] = block.start
            if not flat:
                rows = tools.shape(piece)
                piece = emit.reshape(piece, [*rows[:out_dim], block.outer_length, block.length, *rows[out_dim + 1 :]])
                start[out_dim] = block.outer_start
            if self.axis and self.axis[0] == "cross":
                role = matmul.role(self.consumer.operand, self.axis[1])
                crossing = matmul.output_dim(role)
                start[crossing + (1 if not flat and crossing > out_dim else 0)] = part.cross_start
            nodes.append(piece)
            (shift,) = part.shifts
            shifts.append(shift)
            starts += start
        out = emit.call(overlap.assemble.default, nodes, split, dim, sharded.chunk, shifts, starts, emit.group_name)
        if sharded.short:
            out = emit.narrow(out, dim, 0, full - sharded.missing)
        return emit.reshape(out, shape)

    def _sum(self) -> fx.Node:
        matmul, emit = self.consumer.matmul, self.emit
        bands = [self.totals[b] for b in sorted(self.totals) if b >= 0]
        if not bands:
            total = self.totals[-1]
        elif len(bands) == 1:
            total = bands[0]
        else:
            role = matmul.role(self.consumer.operand, self.axis[1])  # type: ignore[index]
            total = emit.call(aten.cat.default, bands, matmul.output_dim(role))
        if matmul.bias is not None:
            total = emit.call(aten.add.Tensor, total, matmul.bias)
        wanted = tools.dtype(matmul.node)
        if tools.dtype(total) != wanted:
            total = emit.call(torch.ops.prims.convert_element_type.default, total, wanted)
        return total


def together(world_size: int, rows: Size, joined_rows: int) -> list[list[int]]:
    """The distances 1 .. ``world_size - 1`` of the other ranks, in groups. Each rank has ``rows`` rows. A group has the
    fewest ranks that together have ``joined_rows`` rows; the last group may have fewer. If ``rows`` is dynamic, a group
    has one rank."""
    count = -(-joined_rows // max(rows, 1)) if isinstance(rows, int) else 1
    return [list(range(first, min(first + count, world_size))) for first in range(1, world_size, count)]


class EpiloguePieces:
    """Computes the epilogue on the newest piece of each matmul, and joins the pieces of each output."""

    def __init__(self, emit: StepEmitter, epilogue: Epilogue, consumers: list[Consumer]) -> None:
        self.emit, self.epilogue = emit, epilogue
        self.base = {c.consumer.matmul.node: c for c in consumers if c.consumer.matmul.node in epilogue.base}
        self.pieces: dict[fx.Node, list[Piece]] = {n: [] for n in epilogue.outputs}
        self.newest: list[fx.Node] = []

    def compute(self) -> None:
        newest = {node: consumer.pieces[-1] for node, consumer in self.base.items()}
        done = {node: piece.node for node, piece in newest.items()}
        for node in self.epilogue.nodes:
            if tools.is_reshape(node):
                done[node] = done[node.args[0]]
            else:
                copied = self.emit.graph.node_copy(node, lambda n: done[n] if n in done else self._row(n))
                done[node] = self.emit.annotate(copied)
        self.newest = [done[n] for n in self.pieces if n not in self.base]
        for node, pieces in self.pieces.items():
            pieces.append(replace(next(iter(newest.values())), node=done[node]))

    def _row(self, node: fx.Node) -> fx.Node:
        if not tools.is_tensor(node) or len(tools.shape(node)) < 2:
            return node
        return self.emit.reshape(node, tools.shape(node)[-1:])

    def like(self, node: fx.Node) -> Consumer:
        """A matmul whose result has the width of output ``node``. The output's pieces are joined like the matmul's."""
        width = tools.shape(node)[-1]
        return next(c for n, c in self.base.items() if same_size(tools.shape(n)[-1], width))

    def finish(self) -> dict[fx.Node, fx.Node]:
        results = {}
        for node, pieces in self.pieces.items():
            whole = self.like(node).assemble(pieces)
            for last in self.newest:
                # A piece lies in the memory of its assembled output, which may be freed after that output's last
                # reader. But the epilogue may also read the piece to compute another output. So readers of an assembled
                # output wait for the last pieces of all outputs that the epilogue computes.
                whole = whole if last is pieces[-1].node else self.emit.call(overlap.after.default, whole, last)
            results[node] = self.emit.reshape(whole, tools.shape(node))
        return results


def annotate_new(emit: StepEmitter, node: fx.Node) -> None:
    """Annotate nodes that ``matmuls`` wrote without the emitter, operands first."""
    for source in node.all_input_nodes:
        if "val" not in source.meta:
            annotate_new(emit, source)
    emit.annotate(node)


def evaluate(
    emit: StepEmitter, nodes: GatherNodes, node: fx.Node, piece: fx.Node, done: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Compute ``node``, which stands between the gather and an operand, for one slice of the gathered tensor.
    ``piece``: this slice, in the collective's layout. Pointwise ops are copied, views skipped, other nodes returned
    as they are. ``done``: the results so far."""
    if node is nodes.collective.wait:
        return piece
    if node not in done:
        if node in nodes.through or (node.target in tools.SAME and tools.is_pointwise(node)):
            done[node] = evaluate(emit, nodes, nodes.through.get(node, node.args[0]), piece, done)
        elif tools.is_scalar_like(node) and node.op != "call_function" or not tools.is_pointwise(node):
            return node
        else:
            done[node] = emit.annotate(
                emit.graph.node_copy(node, lambda n: evaluate(emit, nodes, n, piece, done) if tools.is_tensor(n) else n)
            )
    return done[node]

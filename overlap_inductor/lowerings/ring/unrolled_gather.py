# SPDX-License-Identifier: Apache-2.0
"""Write ``all-gather -> matmul(s)`` as a ring of unrolled steps, whose hops run under the matmuls (CommFuse Alg. 1).

The steps replace the collective, its wait, the matmuls and their epilogue. The gathered tensor is one buffer in the
collective's own layout, so its other users read the buffer. This rank's own slice is multiplied first, as a whole. Each
later step multiplies one sub-chunk while later sub-chunks travel. ``r``: the rank; ``f``: the ops between gather and
matmul::

    gathered = gather_start(shard)                       # S hops in flight
    y[r]     = f(gathered[r]) @ w
    for step, part: gather_step(hop); y[r - step - 1][part] = f(gathered[r - step - 1][part]) @ w
    out      = assemble(y)                               # B, M or N gathered: written in place
    out      = sum(y)                                    # K gathered: accumulated in fp32
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.gather_nodes import Epilogue
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of
from overlap_inductor.transports import routes

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


def leading_atom(nodes: GatherNodes) -> Atom | None:
    """The outermost dim of a shard in memory. Sub-chunks are cut along it, so that each is contiguous."""
    atoms = [a for a in nodes.raw.flat() if not a.rank]
    return atoms[0] if atoms else None


def can_cut(nodes: GatherNodes) -> bool:
    """Whether a sub-chunk of the shard is a rectangular block of every consumer's operand, and of every tensor from
    which the operand is computed."""
    lead = leading_atom(nodes)
    return (
        lead is not None
        and all(_axis(c, lead) is not None for c in nodes.consumers)
        and row_pieces.can_cut(nodes, lead)
    )


def _axis(consumer: GatherConsumer, lead: Atom) -> tuple[str, int, Size] | None:
    """The place of the cut atom ``lead`` in the operand: ``(chunk | outer | cross, dim, rows that one index of the atom
    spans)``, as in ``row_pieces.position``. ``None`` if the operand cannot be cut along ``lead``."""
    for dim, atoms in enumerate(consumer.layout.refined().dims):
        if any(a is lead for a in atoms):
            found = row_pieces.position(atoms, lead)
            # A cut along a contracted dim that is not gathered would give partial sums, but each piece of the result
            # must be complete. Such a cut occurs if a shard has one row: then its outermost dim is its width.
            if found is None or found[0] == "cross" and consumer.matmul.role(consumer.operand, dim) == "K":
                return None
            return found[0], dim, found[1]
    return None


def crossed_role(nodes: GatherNodes, consumer: GatherConsumer) -> str | None:
    """The role of the matmul's dim that sub-chunks cut, if it is not the gathered dim; else ``None``."""
    lead = leading_atom(nodes)
    axis = _axis(consumer, lead) if lead is not None else None
    return consumer.matmul.role(consumer.operand, axis[1]) if axis is not None and axis[0] == "cross" else None


@dataclass(frozen=True)
class Piece:
    """A part of a consumer's output, computed from the shard of rank ``r + shift``. Its place is ``block`` along the
    gathered dim, and ``cross_start`` along the crossing dim (``_Consumer``)."""

    node: fx.Node
    shift: int
    block: Block
    cross_start: Size


class _Consumer:
    """Multiplies one consumer's pieces and joins their results.

    If sub-chunks cut a dim of the operand that is not the gathered one, that dim is the *crossing dim*.
    """

    def __init__(self, emit: StepEmitter, consumer: GatherConsumer, lead: Atom | None) -> None:
        self.emit, self.consumer = emit, consumer
        self.axis = _axis(consumer, lead) if lead is not None else None
        self.pieces: list[Piece] = []
        self.totals: dict[int, fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.bands: dict[int, tuple[Size, Size]] = {}

    def block(self, start: Size, length: Size) -> tuple[Block, Size, Size | None]:
        """The place of a sub-chunk: ``(block along the gathered dim, start in the crossing dim, length there)``. The
        length is ``None`` if there is no crossing dim."""
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
                other = emit.take_sharded(other, 0, sharded, shift, block)
        else:
            other = emit.take_sharded(other, along, sharded, shift, block)
            operand = emit.without_padding(operand, sharded, shift, block)
        lhs, rhs = (operand, other) if consumer.operand == "lhs" else (other, operand)
        if role != "K":
            piece = matmuls.emit(emit.graph, matmul, lhs, rhs, slicers)
            _annotate_new(emit, piece)
            self.pieces.append(Piece(piece, shift, block, cross_start))
            return
        # The own slice is multiplied as a whole, into total -1. If there is a crossing dim, sub-chunk ``part`` of every
        # other slice is added to total ``part``, which starts as the same part of total -1.
        band = part if cross_length is not None and part is not None else -1
        total = self.totals.get(band)
        if total is None and band >= 0 and -1 in self.totals:
            dim = matmul.output_dim(cross_role)  # type: ignore[arg-type]
            total = emit.narrow(self.totals[-1], dim, cross_start, cross_length)
        node = matmuls.emit_partial(emit.graph, matmul, lhs, rhs, total)
        _annotate_new(emit, node)
        self.totals[band] = node

    def _whole(self, x: fx.Node, dim: int) -> fx.Node:
        """``x``, whose dim ``dim`` is indexed like the gathered dim, with rows of zeros in place of the rows that the
        last shards lack."""
        if x not in self.whole:
            self.whole[x] = self.emit.whole_chunks(x, dim, self.consumer.sharded)
        return self.whole[x]

    def finish(self) -> fx.Node:
        return self._sum() if self.consumer.role == "K" else self.assemble(self.pieces)

    def assemble(self, pieces: list[Piece]) -> fx.Node:
        """Join ``pieces`` of the matmul's output, or of an output of its epilogue. The result has the shape of the
        matmul's output."""
        matmul, emit = self.consumer.matmul, self.emit
        out_dim = matmul.output_dim(self.consumer.role)
        sharded = self.consumer.sharded
        shape = tools.shape(matmul.node)
        full = emit.world_size * sharded.chunk
        flat = isinstance(sharded.outer, int) and sharded.outer == 1
        split = [*shape[:out_dim], *([full] if flat else [sharded.outer, full]), *shape[out_dim + 1 :]]
        dim = out_dim if flat else out_dim + 1
        nodes, shifts, starts = [], [], []
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
            shifts.append(part.shift)
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


class _Epilogue:
    """Computes the epilogue on the newest piece of each of its matmuls, and joins the pieces of each output."""

    def __init__(self, emit: StepEmitter, epilogue: Epilogue, consumers: list[_Consumer]) -> None:
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

    def finish(self) -> dict[fx.Node, fx.Node]:
        results = {}
        for node, pieces in self.pieces.items():
            # All matmuls have the output's rows. The pieces are placed as those of a matmul with the output's width.
            width = tools.shape(node)[-1]
            consumer = next(c for n, c in self.base.items() if same_size(tools.shape(n)[-1], width))
            whole = consumer.assemble(pieces)
            for last in self.newest:
                # A piece of this output may be read to compute a piece of another output. So this output is complete
                # only after the newest pieces of all outputs.
                whole = whole if last is pieces[-1].node else self.emit.call(overlap.after.default, whole, last)
            results[node] = self.emit.reshape(whole, tools.shape(node))
        return results


def _annotate_new(emit: StepEmitter, node: fx.Node) -> None:
    """Annotate nodes that ``matmuls`` wrote into the graph without the emitter, operands first."""
    for source in node.all_input_nodes:
        if "val" not in source.meta:
            _annotate_new(emit, source)
    emit.annotate(node)


def evaluate(
    emit: StepEmitter, nodes: GatherNodes, node: fx.Node, piece: fx.Node, done: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Compute ``node``, a node between the gather and an operand, from one slice ``piece`` in the collective's own
    layout. Pointwise ops are copied and views are skipped; any other node is returned as it is. ``done`` holds the
    results so far."""
    if node is nodes.collective.wait:
        return piece
    if node not in done:
        if node in nodes.through:
            done[node] = evaluate(emit, nodes, nodes.through[node], piece, done)
        elif tools.is_scalar_like(node) and node.op != "call_function" or not tools.is_pointwise(node):
            return node
        else:
            done[node] = emit.annotate(
                emit.graph.node_copy(node, lambda n: evaluate(emit, nodes, n, piece, done) if tools.is_tensor(n) else n)
            )
    return done[node]


def rewrite(emit: StepEmitter, nodes: GatherNodes, parts: int, route: str) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the ring's steps at the insertion point. Returns ``(gathered buffer, {old node: its replacement})``.

    Args:
        parts: sub-chunks of a shard. A shard is not cut if ``can_cut`` does not allow it.
        route: ``ring`` or ``bidirectional`` (``transports.routes``).
    """
    shard = nodes.collective.input
    lead = leading_atom(nodes)
    size = lead.size if lead is not None else 1
    parts = part_count(size, parts) if can_cut(nodes) else 1
    cuts = pieces_of(size, parts)
    rest = _rest(shard, lead)
    bounds = [start * rest for start, _ in cuts] + [size * rest]
    consumers = [_Consumer(emit, c, lead if parts > 1 else None) for c in nodes.consumers]
    gathered = emit.communicate(
        overlap.gather_start.default, emit.chain, shard, bounds, route, emit.group_name, emit.site, *emit.transport
    )
    layout = nodes.raw.without_rank()
    atoms = tuple(a for a in layout.flat())
    flat_layout = Layout((atoms[:1], atoms[1:])) if atoms else layout

    def step(shift: int, part: int | None) -> None:
        start, length = cuts[part] if part is not None else (0, size)
        rows = emit.reshape(gathered, [emit.world_size * size, rest])
        raw = emit.take(rows, 0, shift, size, start, length)
        done: dict[fx.Node, fx.Node] = {}
        sizes = {id(lead): length} if lead is not None else {}
        pieces = (
            row_pieces.RowPieces(emit, nodes, raw, flat_layout, shift, lead, start, length) if nodes.layouts else None
        )
        for target in consumers:
            if pieces is not None:
                operand = pieces.of(target.consumer.operand_node)
            else:
                operand = evaluate(emit, nodes, target.consumer.operand_node, raw, done)
                operand = emit.convert(operand, flat_layout, target.consumer.layout.without_rank(), sizes)
            target.multiply(operand, shift, part, start, length)
        epilogue.compute()

    epilogue = _Epilogue(emit, nodes.epilogue, consumers)
    step(0, None)
    for index, shifts in enumerate(routes.distances(route, emit.world_size)):
        for part in range(parts):
            hop = index * parts + part
            computed = [epilogue.newest] if epilogue.newest else []
            emit.communicate(
                overlap.gather_step.default,
                emit.chain,
                gathered,
                bounds,
                hop,
                route,
                emit.group_name,
                emit.site,
                *computed,
            )
            for shift in shifts:
                step(shift, part if parts > 1 else None)
    whole = {t.consumer.matmul.node: t.finish() for t in consumers if t.consumer.matmul.node not in epilogue.base}
    return gathered, {**whole, **epilogue.finish()}


def _rest(shard: fx.Node, lead: Atom | None) -> Size:
    """Elements of a shard for each index of its outermost dim."""
    shape = list(tools.shape(shard))
    if lead is None:
        return tools.numel(shape)
    index = next(i for i, s in enumerate(shape) if not (isinstance(s, int) and s == 1))
    inner = tools.numel(shape[index + 1 :])
    outer = shape[index]
    if isinstance(outer, int) and isinstance(lead.size, int) and outer != lead.size:
        inner = inner * (outer // lead.size)
    return inner


__all__ = ["can_cut", "evaluate", "leading_atom", "rewrite"]

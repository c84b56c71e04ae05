# SPDX-License-Identifier: Apache-2.0
"""Write ``all-gather -> matmul(s)`` as a ring of unrolled steps, whose hops run under the matmuls (CommFuse, arXiv
2604.24013, algorithm 1).

The gathered tensor is one buffer in the collective's own layout, so its other users can read it. A step multiplies one
sub-chunk while later sub-chunks travel. ``r``: the rank; ``f``: the ops between gather and matmul::

    gathered = gather_start(shard)                       # S hops in flight
    y[r]     = f(gathered[r]) @ w
    for step, part: gather_step(hop); y[r - step - 1][part] = f(gathered[r - step - 1][part]) @ w
    if dim B, M or N of the matmul is gathered:
        out = assemble(y)                                # written in place
    if dim K of the matmul is gathered:
        out = sum(y)                                     # accumulated in fp32, fp64 or int32

These are the steps of route ``ring``. On route ``bidirectional``, a step may bring a second sub-chunk, which belongs to
the shard of rank ``r + step + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_cuts import can_cut
from overlap_inductor.lowerings.ring.gather_cuts import leading_atom
from overlap_inductor.lowerings.ring.gather_pieces import Consumer
from overlap_inductor.lowerings.ring.gather_pieces import EpiloguePieces
from overlap_inductor.lowerings.ring.gather_pieces import evaluate
from overlap_inductor.lowerings.ring.gather_pieces import together
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of
from overlap_inductor.transports import routes

overlap = torch.ops.overlap_inductor


class Steps:
    """Multiplies sub-chunks of ``gathered``, the buffer of all shards, as they arrive.

    Args:
        parts: number of sub-chunks of a shard; 1 is used if ``can_cut`` forbids cuts.
        joined_rows: one matmul multiplies sub-chunks of several ranks until it has this many rows (``together``), if
            the site allows it.

    Attributes:
        bounds: offsets in a shard, in elements: where each sub-chunk begins, and where the last one ends.
        groups: the distances of the other ranks. One matmul multiplies a sub-chunk of all ranks of a group.
        joined: whether a group has several ranks.
        newest: the epilogue's newest pieces. If ``joined``: tokens of the newest copies to ``placed``, and the newest
            joined sums over a gathered K. The caller passes them to the next wait for ``gathered``, which then runs
            after them. Without this order, Inductor may run joined matmuls after all waits, because only a copy of
            their operand reads ``gathered``.
        placed: the outputs, by old node, if ``joined``.
    """

    def __init__(self, emit: StepEmitter, nodes: GatherNodes, parts: int, joined_rows: int = 1) -> None:
        self.emit, self.nodes, self.lead = emit, nodes, leading_atom(nodes)
        self.size: Size = self.lead.size if self.lead is not None else 1
        self.parts = part_count(self.size, parts) if can_cut(nodes) else 1
        self.cuts = pieces_of(self.size, self.parts)
        self.rest = _rest(nodes.shard_shape, self.lead)
        self.bounds = [start * self.rest for start, _ in self.cuts] + [self.size * self.rest]
        self.consumers = [Consumer(emit, c, self.lead if self.parts > 1 else None) for c in nodes.consumers]
        self.epilogue = EpiloguePieces(emit, nodes.epilogue, self.consumers)
        joins = not nodes.layouts and all(consumer.joins for consumer in self.consumers)
        rows = nodes.consumers[0].sharded.chunk // self.parts
        self.groups = together(emit.world_size, rows, joined_rows if joins else 1)
        self.joined = len(self.groups) < emit.world_size - 1
        self.placed: dict[fx.Node, fx.Node] = {}
        self.newest: list[fx.Node] = []
        atoms = tuple(nodes.raw.without_rank().flat())
        self.order = Layout((atoms[:1], atoms[1:])) if atoms else nodes.raw.without_rank()

    def multiply(self, gathered: fx.Node, shift: int, part: int | None) -> None:
        """Multiply sub-chunk ``part`` of the shard of rank ``r + shift``; the whole shard if ``part`` is ``None``."""
        emit, nodes, lead = self.emit, self.nodes, self.lead
        start, length = self.cuts[part] if part is not None else (0, self.size)
        rows = emit.reshape(gathered, [emit.world_size * self.size, self.rest])
        raw = emit.take(rows, 0, shift, self.size, start, length)
        done: dict[fx.Node, fx.Node] = {}
        sizes = {id(lead): length} if lead is not None else {}
        pieces = (
            row_pieces.RowPieces(emit, nodes, raw, self.order, shift, lead, start, length) if nodes.layouts else None
        )
        for target in self.consumers:
            if pieces is not None:
                operand = pieces.of(target.consumer.operand_node)
            else:
                operand = evaluate(emit, nodes, target.consumer.operand_node, raw, done)
                operand = emit.convert(operand, self.order, target.consumer.layout.without_rank(), sizes)
            target.multiply(operand, shift, part, start, length)
        self._finish_pieces()

    def multiply_together(self, gathered: fx.Node, shifts: Sequence[int], part: int) -> None:
        """Like ``multiply`` for sub-chunk ``part`` of the shard of each rank ``r + shift``. The sub-chunks are copied
        to one tensor, and each consumer multiplies this tensor with one matmul. Call this only if ``joined``."""
        emit, lead = self.emit, self.lead
        assert lead is not None
        start, length = self.cuts[part]
        rows = emit.reshape(gathered, [emit.world_size * self.size, self.rest])
        raw = emit.take_ranks(rows, 0, shifts, self.size, start, length)
        done: dict[fx.Node, fx.Node] = {}
        sizes = {id(lead): len(shifts) * length}
        sums = []
        for target in self.consumers:
            operand = evaluate(emit, self.nodes, target.consumer.operand_node, raw, done)
            operand = emit.convert(operand, self.order, target.consumer.layout.without_rank(), sizes)
            node = target.multiply_together(operand, shifts, start, length)
            sums += [node] if target.consumer.role == "K" else []
        self._finish_pieces()
        self.newest += sums

    def _finish_pieces(self) -> None:
        """Compute the epilogue on the newest pieces. If ``joined``, copy the newest pieces of all outputs to their
        places now. So their memory is free before the next band is multiplied."""
        self.epilogue.compute()
        if not self.joined:
            self.newest = self.epilogue.newest
            return
        self.newest = []
        base = self.epilogue.base
        outputs = {n: (c, c.pieces) for c in self.consumers if c.pieces and (n := c.consumer.matmul.node) not in base}
        outputs |= {n: (self.epilogue.like(n), pieces) for n, pieces in self.epilogue.pieces.items()}
        for node, (consumer, pieces) in outputs.items():
            self.placed[node], token = consumer.place(self.placed.get(node), pieces[-1])
            self.newest.append(token)

    def finish(self) -> dict[fx.Node, fx.Node]:
        base = self.epilogue.base
        rest = [t for t in self.consumers if (n := t.consumer.matmul.node) not in base and n not in self.placed]
        whole = {t.consumer.matmul.node: t.finish() for t in rest}
        if self.joined:
            return whole | {n: self.emit.reshape(x, tools.shape(n)) for n, x in self.placed.items()}
        return {**whole, **self.epilogue.finish()}


def rewrite(emit: StepEmitter, nodes: GatherNodes, parts: int, route: str) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the ring's steps at the insertion point. Returns ``(gathered buffer, {old node: its replacement})``.
    ``route``: ``ring`` or ``bidirectional``."""
    steps = Steps(emit, nodes, parts)
    where = (route, emit.group_name, emit.site)
    gathered = emit.communicate(
        overlap.gather_start.default, emit.chain, nodes.collective.input, steps.bounds, *where, *emit.transport
    )
    steps.multiply(gathered, 0, None)
    for index, shifts in enumerate(routes.distances(route, emit.world_size)):
        for part in range(steps.parts):
            hop = index * steps.parts + part
            computed = [steps.newest] if steps.newest else []
            emit.communicate(overlap.gather_step.default, emit.chain, gathered, steps.bounds, hop, *where, *computed)
            for shift in shifts:
                steps.multiply(gathered, shift, part if steps.parts > 1 else None)
    return gathered, steps.finish()


def _rest(shape: list[Size], lead: Atom | None) -> Size:
    """The number of a shard's elements for each index of ``lead``, a dim or a factor of a dim. If ``lead`` is ``None``,
    the number of all the shard's elements."""
    if lead is None:
        return tools.numel(shape)
    index = next(i for i, s in enumerate(shape) if not (isinstance(s, int) and s == 1))
    inner = tools.numel(shape[index + 1 :])
    outer = shape[index]
    if isinstance(outer, int) and isinstance(lead.size, int) and outer != lead.size:
        inner = inner * (outer // lead.size)
    return inner


__all__ = ["Steps", "rewrite"]

# SPDX-License-Identifier: Apache-2.0
"""Write the two sites of a seam in bands: a reduce-scatter, and the gather after it.

A band is a sub-chunk of every rank's shard. In the reduce-scatter, each band has its own wait. In the gather, each
band has its own send. So ``passes.sequence.seams`` can put steps of the gather between the waits of the
reduce-scatter. ``r``: this rank. ``slice(q)``: this rank's partial sums of the rows that rank ``q`` gets::

    for band: for i in 0 .. W-2: p = slice(r + 1 + i)[band]; send p to rank r + 1 + i     # ``together``
    own = slice(r)
    for band: wait; rows[band] = own[band] + sum(received[band])
    out = cat(rows)

    gathered = exchange_start()
    for band: send shard[band] to all ranks; y[r][band] = gathered[r][band] @ w
    for band: wait; for i in 1 .. W-1: y[r - i][band] = gathered[r - i][band] @ w         # ``together``
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_pieces import JOINABLE
from overlap_inductor.lowerings.ring.reduce_slices import Slices
from overlap_inductor.lowerings.ring.unrolled_gather import Steps
from overlap_inductor.lowerings.ring.unrolled_reduce import summed
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import pieces_of
from overlap_inductor.torch_compat.target import on_gpu

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor

JOINED_ROWS = 256
"""On a CPU, one matmul multiplies a band of several ranks, because small matmuls are slow. The ranks are as many as
give the matmul at least this many rows. A forward of two Llama layers (hidden size 2048, 1024 tokens, bands of 64 rows)
on 4 ranks took 813 ms with joined matmuls, and 889 ms without. The link had 1000 Mbit/s."""


def together(world_size: int, rows: Size, joins: bool) -> list[list[int]]:
    """The distances 1 .. ``world_size - 1`` of the other ranks, in groups. One matmul multiplies a band, of ``rows``
    rows for each rank, of all ranks of a group. Without ``joins``, or if ``rows`` is dynamic, each rank is a group of
    its own."""
    count = -(-JOINED_ROWS // max(rows, 1)) if joins and isinstance(rows, int) else 1
    return [list(range(first, min(first + count, world_size))) for first in range(1, world_size, count)]


def scatter_joins(nodes: ReduceNodes) -> bool:
    """Whether one matmul may multiply the bands of several ranks' slices."""
    plain = all(m.kind in JOINABLE for m in nodes.leaves) and nodes.role == "M"
    return plain and not on_gpu(tools.value(nodes.collectives[0].input).device)


def rewrite_scatter(emit: StepEmitter, nodes: ReduceNodes, bands: int) -> fx.Node:
    """Write the steps of a reduce-scatter of rows. Returns this rank's rows, a ``cat`` of the bands."""
    collective, sharded = nodes.collectives[0], nodes.sharded
    world_size, dtype, reduce_op = emit.world_size, tools.dtype(collective.input), collective.reduce_op or "sum"
    slices, cuts = Slices(emit, nodes), pieces_of(sharded.chunk, bands)
    inner = tools.numel(nodes.shape[1:])
    bounds = [start * inner for start, _ in cuts] + [sharded.chunk * inner]
    where = ("owner", emit.group_name, emit.site)
    buffer = emit.communicate(
        overlap.exchange_start.default, emit.chain, [world_size - 1, bounds[-1]], bounds, dtype, *where, *emit.transport
    )
    sent: dict[int, fx.Node] = {}
    for band, cut in enumerate(cuts):
        for distances in together(world_size, cut[1], scatter_joins(nodes)):
            block = Block(*cut, 0, 1)
            alone = len(distances) == 1
            pieces = [slices.of_rank(distances[0], block)] if alone else slices.of_ranks(distances, block)
            for distance, piece in zip(distances, pieces, strict=True):
                hop = (distance - 1) * bands + band
                sent[hop] = piece
                token = emit.communicate(overlap.exchange_send.default, emit.chain, buffer, piece, bounds, hop, *where)
            slices.after = token
    own = slices.of_rank(0, Block.whole(sharded))
    rows = []
    for band, (start, length) in enumerate(cuts):
        hops = [step * bands + band for step in range(world_size - 1)]
        held = [*(sent[hop] for hop in hops), own]
        emit.communicate(overlap.exchange_wait.default, emit.chain, buffer, held, bounds, hops, *where)
        mine = emit.window(own, 0, start, length)
        received = emit.window(buffer, 1, bounds[band], bounds[band + 1] - bounds[band])
        received = emit.reshape(received, [world_size - 1, *tools.shape(mine)])
        rows.append(summed(emit, mine, received, reduce_op, dtype))
    return emit.call(aten.cat.default, rows)


def rewrite_gather(emit: StepEmitter, nodes: GatherNodes, bands: int) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the steps of a gather of rows. Returns ``(gathered buffer, {old node: its replacement})``."""
    steps, shard = Steps(emit, nodes, bands), nodes.collective.input
    where = ("broadcast", emit.group_name, emit.site)
    shape, dtype = tools.shape(nodes.collective.node), tools.dtype(shard)
    gathered = emit.communicate(
        overlap.exchange_start.default, emit.chain, shape, steps.bounds, dtype, *where, *emit.transport
    )
    joins = steps.joins and not on_gpu(tools.value(shard).device)
    computed: list[fx.Node] = []
    for band, (start, length) in enumerate(steps.cuts):
        piece = emit.narrow(shard, 0, start, length)
        emit.communicate(overlap.exchange_send.default, emit.chain, gathered, piece, steps.bounds, band, *where)
        steps.multiply(gathered, 0, band)
        computed += steps.epilogue.newest
    for band in range(bands):
        before = [computed] if computed else []
        emit.communicate(overlap.exchange_wait.default, emit.chain, gathered, [], steps.bounds, [band], *where, *before)
        computed = []
        for distances in together(emit.world_size, steps.rows_of(band), joins):
            if len(distances) > 1:
                computed += steps.multiply_together(gathered, [-distance for distance in distances], band)
                continue
            steps.multiply(gathered, -distances[0], band)
            computed += steps.epilogue.newest
    return gathered, steps.finish()


__all__ = ["rewrite_gather", "rewrite_scatter"]

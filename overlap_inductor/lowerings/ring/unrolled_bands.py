# SPDX-License-Identifier: Apache-2.0
"""Write the two sites of a seam in bands: a reduce-scatter, and the gather after it.

A band is a sub-chunk of every rank's shard. In the reduce-scatter, each band has its own wait. In the gather, each
band has its own send. So ``passes.sequence.seams`` can put steps of the gather between the waits of the
reduce-scatter. ``r``: this rank. ``slice(q)``: this rank's partial sums of the rows that rank ``q`` gets::

    for band: for i in 0 .. W-2: p = slice(r + 1 + i)[band]; send p to rank r + 1 + i
    own = slice(r)
    for band: wait; rows[band] = own[band] + sum(received[band])
    out = cat(rows)

    gathered = exchange_start()
    for band: send shard[band] to all ranks; y[r][band] = gathered[r][band] @ w
    for band: wait; for i in 1 .. W-1: y[r - i][band] = gathered[r - i][band] @ w
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.ring.reduce_slices import Slices
from overlap_inductor.lowerings.ring.unrolled_gather import Steps
from overlap_inductor.lowerings.ring.unrolled_reduce import summed
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import pieces_of

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


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
        for step in range(world_size - 1):
            hop = step * bands + band
            sent[hop] = slices.of_rank(step + 1, Block(*cut, 0, 1))
            slices.after = emit.communicate(
                overlap.exchange_send.default, emit.chain, buffer, sent[hop], bounds, hop, *where
            )
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
        for distance in range(1, emit.world_size):
            steps.multiply(gathered, -distance, band)
            computed += steps.epilogue.newest
    return gathered, steps.finish()


__all__ = ["rewrite_gather", "rewrite_scatter"]

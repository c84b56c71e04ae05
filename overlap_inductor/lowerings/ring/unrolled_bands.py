# SPDX-License-Identifier: Apache-2.0
"""Write the two sites of a seam in bands: a reduce-scatter, and the gather after it.

A band is a sub-chunk of every rank's shard. In the reduce-scatter, each band has its own wait. In the gather, each
band has its own send. So ``passes.sequence.seams`` can put steps of the gather between the waits of the
reduce-scatter. ``r``: this rank. ``slice(q)``: this rank's partial sums of the rows that rank ``q`` gets::

    for band: for i in 0 .. W-2: p = slice(r + 1 + i)[band]; send p to rank r + 1 + i     # see below
    own = slice(r)
    for band: wait; rows[band] = own[band] + sum(received[band])
    out = cat(rows)

    gathered = exchange_start()
    for band: send shard[band] to all ranks; y[r][band] = gathered[r][band] @ w
    for band: wait; for i in 1 .. W-1: y[r + i][band] = gathered[r + i][band] @ w         # see below

All other ranks' rows of a band arrive together. They are multiplied in the order in which the next scatter sends their
products (``passes.sequence.seams.write_chain``).

On a CPU, one matmul computes a small band of several ranks (``JOINED_ROWS``). In the reduce-scatter, one op then sends
the results to all these ranks. In the gather, results are copied to their places in ``y`` as soon as they are computed.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_pieces import JOINABLE
from overlap_inductor.lowerings.ring.gather_pieces import together
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
"""On a CPU, one matmul multiplies a band of several ranks, because small matmuls are slow. It takes the fewest ranks
whose bands together have at least this many rows, or all ranks that are left. A forward of two Llama layers (hidden
size 2048, 1024 tokens, bands of 64 rows) on 4 ranks took 813 ms with joined matmuls, and 889 ms without. The link had
1000 Mbit/s."""


def _joined_rows(device: torch.device) -> int:
    return JOINED_ROWS if device.type == "cpu" and not on_gpu(device) else 1


def scatter_groups(nodes: ReduceNodes, world_size: int, rows: Size) -> list[list[int]]:
    """The distances 1 .. ``world_size - 1`` of the other ranks, in groups. One matmul multiplies a band of all ranks of
    a group. ``rows``: the rows of a band for each rank."""
    joins = all(m.kind in JOINABLE for m in nodes.leaves) and nodes.role == "M"
    device = tools.value(nodes.collectives[0].input).device
    return together(world_size, rows, _joined_rows(device) if joins else 1)


def gather_groups(nodes: GatherNodes, world_size: int, rows: Size) -> list[list[int]]:
    """As ``scatter_groups`` for the gather. The groups of ``Steps`` are smaller if its first dim cannot be cut."""
    joins = not nodes.layouts and all(
        c.matmul.kind in JOINABLE and (c.role == "K" or (c.role, c.operand) == ("M", "lhs")) for c in nodes.consumers
    )
    return together(world_size, rows, _joined_rows(tools.value(nodes.collective.input).device) if joins else 1)


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
    sent: dict[int, list[fx.Node]] = {}
    for band, cut in enumerate(cuts):
        block = Block(*cut, 0, 1)
        for distances in scatter_groups(nodes, world_size, cut[1]):
            alone = len(distances) == 1
            piece = slices.of_rank(distances[0], block) if alone else slices.of_ranks(distances, block)
            hop, *others = ((distance - 1) * bands + band for distance in distances)
            further = [others] if others else []
            slices.after = emit.communicate(
                overlap.exchange_send.default, emit.chain, buffer, piece, bounds, hop, *where, *further
            )
            sent.setdefault(band, []).append(piece)
    own = slices.of_rank(0, Block.whole(sharded))
    summed_rows = []
    for band, (start, length) in enumerate(cuts):
        hops = [step * bands + band for step in range(world_size - 1)]
        held = [*sent[band], own]
        emit.communicate(overlap.exchange_wait.default, emit.chain, buffer, held, bounds, hops, *where)
        mine = emit.window(own, 0, start, length)
        received = emit.window(buffer, 1, bounds[band], bounds[band + 1] - bounds[band])
        received = emit.reshape(received, [world_size - 1, *tools.shape(mine)])
        summed_rows.append(summed(emit, mine, received, reduce_op, dtype))
    return emit.call(aten.cat.default, summed_rows)


def rewrite_gather(emit: StepEmitter, nodes: GatherNodes, bands: int) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the steps of a gather of rows. Returns ``(gathered buffer, {old node: its replacement})``."""
    shard = nodes.collective.input
    steps = Steps(emit, nodes, bands, _joined_rows(tools.value(shard).device))
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
        computed += steps.newest
    for band in range(bands):
        before = [computed] if computed else []
        emit.communicate(overlap.exchange_wait.default, emit.chain, gathered, [], steps.bounds, [band], *where, *before)
        computed = []
        for distances in steps.groups:
            if len(distances) > 1:
                steps.multiply_together(gathered, distances, band)
            else:
                steps.multiply(gathered, distances[0], band)
            computed += steps.newest
    return gathered, steps.finish()


__all__ = ["gather_groups", "rewrite_gather", "rewrite_scatter", "scatter_groups"]

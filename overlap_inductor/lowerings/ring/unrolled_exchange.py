# SPDX-License-Identifier: Apache-2.0
"""Write ``matmul(s) -> all-to-all`` and ``all-to-all -> matmul(s)`` as unrolled steps.

A *slice* is what one rank sends to another rank, or keeps for itself. Each hop sends a slice, or a part of a slice,
straight to the rank that needs it.

Slices travel under the matmuls of later slices, and under the ops before the program's wait (arXiv:2305.06942, section
3; CommFuse, arXiv 2604.24013, sections 1.5 and 1.6). ``r``: the rank::

    for i in 1 .. W-1, part: p = slice(r + i)[part]; send p to rank r + i
    received[r] = slice(r)
    ...                                                  # what the program computes before it waits
    wait; out = received

In ``all-to-all -> matmul(s)``, tokens are multiplied when they have arrived. ``x[s]``: the slice for rank s. ``f``:
the ops between the all-to-all and the matmul::

    send parts of x[r + 1]; received[r] = x[r]; y[r] = f(received[r]) @ w
    for i in 1 .. W-1, part: wait; send the next unsent part; y[r - i][part] = f(received[r - i][part]) @ w

Elements are sent in the order in which the matmul computes or reads them. ``parts``: the number of sub-chunks of a
slice.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.exchanged_rows import arranged
from overlap_inductor.lowerings.exchanged_rows import given
from overlap_inductor.lowerings.exchanged_rows import sent_rows
from overlap_inductor.lowerings.ring.reduce_slices import Slices
from overlap_inductor.lowerings.ring.unrolled_gather import Steps
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of

overlap = torch.ops.overlap_inductor
ROUTE = "direct"


def rewrite_sent(emit: StepEmitter, nodes: SentNodes, parts: int) -> Replaced:
    """Write the steps of ``matmul -> all-to-all``."""
    (collective,) = nodes.collectives
    world_size, dtype = emit.world_size, tools.dtype(collective.input)
    slices = Slices(emit, nodes)
    cuts = pieces_of(nodes.lead, part_count(nodes.lead, parts))
    bounds = [start * nodes.rest for start, _ in cuts] + [nodes.lead * nodes.rest]
    where = (ROUTE, emit.group_name, emit.site)
    shape = [world_size, bounds[-1]]
    buffer = emit.communicate(overlap.exchange_start.default, emit.chain, shape, bounds, dtype, *where, *emit.transport)
    sent = []
    for step in range(world_size - 1):
        for part, cut in enumerate(cuts):
            piece = slices.of_rank(step + 1, *_place(nodes, *cut))
            hop = step * len(cuts) + part
            slices.after = emit.communicate(
                overlap.exchange_send.default, emit.chain, buffer, piece, bounds, hop, *where
            )
            sent.append(piece)
    own = slices.of_rank(0, Block.whole(nodes.sharded))
    emit.call(overlap.exchange_keep.default, buffer, own, emit.group_name)
    with emit.graph.inserting_before(collective.wait):
        hops = list(range((world_size - 1) * len(cuts)))
        emit.communicate(overlap.exchange_wait.default, emit.chain, buffer, sent, bounds, hops, *where)
        return arranged(emit, nodes, buffer)


def _place(nodes: SentNodes, start: Size, length: Size) -> tuple[Block, tuple[Size, Size] | None]:
    """``(block of the sharded dim, rows of dim 0)`` of a sub-chunk. The sub-chunk is cut along the outermost dim of a
    slice (of size ``SentNodes.lead``): ``length`` indices, from index ``start`` on. The rows are ``None`` if dim 0 is
    the sharded one."""
    sharded = nodes.sharded
    if sharded.dim:
        return Block.whole(sharded), (start, length)
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        return Block(start, length, 0, 1), None
    return Block(0, sharded.chunk, start, length), None


def rewrite_received(emit: StepEmitter, nodes: ReceivedNodes, parts: int) -> tuple[fx.Node, Replaced]:
    """Write the steps of ``all-to-all -> matmul``. Returns ``(node of the collective's result, {old node: its
    replacement})``."""
    steps = Steps(emit, nodes, parts)
    where, bounds = (ROUTE, emit.group_name, emit.site), steps.bounds
    rows = emit.reshape(sent_rows(emit, nodes), [emit.world_size * steps.size, steps.rest])
    buffer = emit.communicate(
        overlap.exchange_start.default,
        emit.chain,
        [emit.world_size, bounds[-1]],
        bounds,
        tools.dtype(nodes.collective.input),
        *where,
        *emit.transport,
    )
    sent = []

    def send(hop: int) -> None:
        step, part = divmod(hop, steps.parts)
        sent.append(emit.take(rows, 0, step + 1, steps.size, *steps.cuts[part]))
        emit.communicate(overlap.exchange_send.default, emit.chain, buffer, sent[hop], bounds, hop, *where)

    hops = (emit.world_size - 1) * steps.parts
    for hop in range(min(steps.parts, hops)):
        send(hop)
    own = emit.take(rows, 0, 0, steps.size, 0, steps.size)
    emit.call(overlap.exchange_keep.default, buffer, own, emit.group_name)
    steps.multiply(buffer, 0, None)
    for hop in range(hops):
        computed = [steps.newest] if steps.newest else []
        emit.communicate(
            overlap.exchange_wait.default, emit.chain, buffer, [sent[hop]], bounds, [hop], *where, *computed
        )
        if hop + steps.parts < hops:
            send(hop + steps.parts)
        step, part = divmod(hop, steps.parts)
        steps.multiply(buffer, -1 - step, part if steps.parts > 1 else None)
    return given(emit, nodes, buffer), steps.finish()

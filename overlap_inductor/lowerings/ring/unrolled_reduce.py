# SPDX-License-Identifier: Apache-2.0
"""Write ``matmul(s) -> reduce-scatter | all-reduce | all-gather of the output`` as unrolled steps of a ring.

Slices of the collective's input are computed in the order in which they are sent, this rank's own slice last. The
matmul of the own slice can hide the last transfer. Below, ``r`` is the rank, ``W`` the number of ranks, and ``part`` a
sub-chunk of a slice. Ranks count modulo ``W``.

Reduce-scatter, route ``owner`` (CommFuse, arXiv 2604.24013, Fig. 8b). Numerics ``preserve``: each partial sum travels
once in the collective's dtype and is added once, in at least fp32::

    for i in 0 .. W-2, part: p = slice(r + 1 + i)[part]; send p to rank r + 1 + i
    own = slice(r); wait; out = own + sum(received)

Reduce-scatter, route ``travel`` (CommFuse Alg. 2). One accumulator for each slice visits every rank. It is rounded at
each hop, so numerics ``allow_hop_rounding`` is needed::

    for i in 0 .. W-1: add slice(r - 1 - i) to its accumulator; if i < W-1: send the accumulator to rank r + 1

All-reduce: the rows of a shard are cut into S bands. Each band is reduce-scattered on route ``owner``. On a CPU, the
rank waits for a band's partial sums as soon as it has multiplied its own slice of the band. It then broadcasts the sum
under the matmuls of the next band::

    for each band: for i in 0 .. W-2: p = slice(r + 1 + i)[band]; send p to rank r + 1 + i
                   own = slice(r)[band]; wait; broadcast own + sum(received)
    wait for the broadcasts

On a GPU, the wait for a band comes one band later, after the next band's own slice. The stream of the matmuls would
otherwise stand still in each wait. If W does not divide the rows, one small collective reduces the rest.

All-gather of an output: this rank's rows are cut into S bands. A band is sent to all ranks while the next band
is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.ring.reduce_slices import Slices
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of
from overlap_inductor.torch_compat.target import on_gpu

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
convert_dtype = torch.ops.prims.convert_element_type.default


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums are added: at least fp32 for floats; for integers the dtype itself."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def summed(emit: StepEmitter, own: fx.Node, received: fx.Node, reduce_op: str, dtype: torch.dtype) -> fx.Node:
    """``own + received.sum(0)``, divided by the world size for ``avg``, in ``_wide(dtype)``. The result is rounded once
    to ``dtype``, the collective's dtype."""
    wide = _wide(dtype)

    def widen(x: fx.Node) -> fx.Node:
        return x if tools.dtype(x) == wide else emit.call(convert_dtype, x, wide)

    # By default, ``sum`` of integers returns int64.
    exact = {} if wide.is_floating_point else {"dtype": wide}
    total = emit.call(aten.add.Tensor, widen(own), emit.call(aten.sum.dim_IntList, widen(received), [0], **exact))
    if reduce_op == "avg":
        total = emit.call(aten.div.Tensor, total, emit.world_size)
    return total if wide == dtype else emit.call(convert_dtype, total, dtype)


def rewrite_reduce_scatter(emit: StepEmitter, nodes: ReduceNodes, parts: int, route: str) -> fx.Node:
    """Write the steps of a reduce-scatter. Returns this rank's result, contiguous and in the collective's shape.
    ``parts``: the number of sub-chunks of a shard. ``route``: ``owner`` or ``travel``."""
    collective, sharded = nodes.collectives[0], nodes.sharded
    world_size, dtype = emit.world_size, tools.dtype(collective.input)
    slices = Slices(emit, nodes)
    parts = part_count(sharded.chunk, parts)
    cuts = pieces_of(sharded.chunk, parts)
    shape = nodes.shape
    inner = tools.numel([s for i, s in enumerate(shape) if i != sharded.dim])
    unit = sharded.outer * inner
    bounds = [start * unit for start, _ in cuts] + [sharded.chunk * unit]
    buffer = emit.communicate(
        overlap.exchange_start.default,
        emit.chain,
        [world_size - 1, bounds[-1]],
        bounds,
        dtype,
        route,
        emit.group_name,
        emit.site,
        *emit.transport,
    )
    arguments = (route, emit.group_name, emit.site)
    reduce_op = collective.reduce_op or "sum"
    blocks = [Block(start, length, 0, sharded.outer) for start, length in cuts]
    if route == "travel":
        own = _travel(emit, slices, blocks, buffer, bounds, arguments, reduce_op, dtype)
    else:
        sent = []
        for step in range(world_size - 1):
            for part, block in enumerate(blocks):
                piece = slices.of_rank(step + 1, block)
                slices.after = emit.communicate(
                    overlap.exchange_send.default, emit.chain, buffer, piece, bounds, step * parts + part, *arguments
                )
                sent.append(piece)
        own = slices.of_rank(0, Block.whole(sharded))
        hops = list(range((world_size - 1) * parts))
        emit.communicate(overlap.exchange_wait.default, emit.chain, buffer, [*sent, own], bounds, hops, *arguments)
        own = _sum_parts(emit, nodes, own, buffer, bounds, blocks, reduce_op, dtype)
    target = _scattered_layout(nodes)
    result = emit.convert(own, nodes.leaf_layout.without_rank(), target)
    result = emit.reshape(result, tools.shape(collective.node))
    return emit.contiguous(result)


def _scattered_layout(nodes: ReduceNodes) -> Layout:
    return nodes.layouts[nodes.computed[0]].without_rank()


def _leaf_shape(nodes: ReduceNodes, rows: Size) -> list[Size]:
    shape = nodes.shape
    shape[nodes.sharded.dim] = rows
    return shape


def _sum_parts(
    emit: StepEmitter,
    nodes: ReduceNodes,
    own: fx.Node,
    buffer: fx.Node,
    bounds: list[Any],
    blocks: list[Block],
    reduce_op: str,
    dtype: torch.dtype,
) -> fx.Node:
    sharded = nodes.sharded
    lead = sharded.dim == 0 and isinstance(sharded.outer, int) and sharded.outer == 1
    if lead or len(blocks) == 1:
        received = emit.reshape(buffer, [emit.world_size - 1, *tools.shape(own)])
        return summed(emit, own, received, reduce_op, dtype)
    # What a peer sends lies in the buffer sub-chunk after sub-chunk. In ``own``, the sub-chunks' rows are interleaved.
    dim = sharded.dim
    shape = tools.shape(own)
    split = emit.reshape(own, [*shape[:dim], sharded.outer, sharded.chunk, *shape[dim + 1 :]])
    parts = []
    for part, block in enumerate(blocks):
        mine = emit.narrow(split, dim + 1, block.start, block.length)
        received = emit.narrow(buffer, 1, bounds[part], bounds[part + 1] - bounds[part])
        received = emit.reshape(received, [emit.world_size - 1, *tools.shape(mine)])
        parts.append(summed(emit, mine, received, reduce_op, dtype))
    return emit.reshape(emit.call(aten.cat.default, parts, dim + 1), shape)


def _travel(
    emit: StepEmitter,
    slices: Slices,
    blocks: list[Block],
    buffer: fx.Node,
    bounds: list[Any],
    arguments: tuple[str, str, str],
    reduce_op: str,
    dtype: torch.dtype,
) -> fx.Node:
    nodes, world_size, parts = slices.nodes, emit.world_size, len(blocks)
    sent: dict[int, fx.Node] = {}
    finished = []
    for step in range(world_size):
        for part, block in enumerate(blocks):
            piece = slices.of_rank(-1 - step, block)
            if step:
                hop = (step - 1) * parts + part
                emit.communicate(
                    overlap.exchange_wait.default, emit.chain, buffer, [sent[part], piece], bounds, [hop], *arguments
                )
                arrived = emit.narrow(
                    emit.call(aten.select.int, buffer, 0, step - 1), 0, bounds[part], bounds[part + 1] - bounds[part]
                )
                arrived = emit.reshape(arrived, tools.shape(piece))
                wide = _wide(dtype)
                terms = [x if tools.dtype(x) == wide else emit.call(convert_dtype, x, wide) for x in (arrived, piece)]
                piece = emit.call(aten.add.Tensor, *terms)
                if step == world_size - 1 and reduce_op == "avg":
                    piece = emit.call(aten.div.Tensor, piece, world_size)
                if wide != dtype:
                    piece = emit.call(convert_dtype, piece, dtype)
                piece = slices.in_memory(piece)
            if step < world_size - 1:
                hop = step * parts + part
                slices.after = emit.communicate(
                    overlap.exchange_send.default, emit.chain, buffer, piece, bounds, hop, *arguments
                )
                sent[part] = piece
            else:
                finished.append(piece)
    if len(finished) == 1:
        return finished[0]
    sharded, dim = nodes.sharded, nodes.sharded.dim
    shape = tools.shape(finished[0])
    split = [
        emit.reshape(p, [*shape[:dim], sharded.outer, b.length, *shape[dim + 1 :]])
        for p, b in zip(finished, blocks, strict=True)
    ]
    joined = emit.call(aten.cat.default, split, dim + 1)
    return emit.reshape(joined, _leaf_shape(nodes, sharded.outer * sharded.chunk))


def rewrite_all_reduce(emit: StepEmitter, nodes: ReduceNodes, parts: int) -> fx.Node:
    """Write the steps of an all-reduce. Returns the reduced tensor, contiguous and in the collective's shape.
    ``parts``: the number of bands of a shard's rows."""
    collective, sharded = nodes.collectives[0], nodes.sharded
    world_size, dtype = emit.world_size, tools.dtype(collective.input)
    reduce_op = collective.reduce_op or "sum"
    slices = Slices(emit, nodes)
    parts = part_count(sharded.chunk, parts)
    cuts = pieces_of(sharded.chunk, parts)
    shape = nodes.shape
    inner = tools.numel(shape[1:])
    bounds = [start * inner for start, _ in cuts] + [sharded.chunk * inner]
    tail = ("owner", emit.group_name, emit.site)
    back = ("broadcast", emit.group_name, emit.site)
    partials = emit.communicate(
        overlap.exchange_start.default, emit.chain, [world_size - 1, bounds[-1]], bounds, dtype, *tail, *emit.transport
    )
    result = emit.communicate(
        overlap.exchange_start.default, emit.chain, list(shape), bounds, dtype, *back, *emit.transport
    )
    blocks = [Block(start, length, 0, 1) for start, length in cuts]

    def return_band(band: int, own: fx.Node, sent: list[fx.Node], newest: fx.Node) -> None:
        hops = [step * parts + band for step in range(world_size - 1)]
        closing = [*sent, own] if newest is own else [*sent, own, newest]
        emit.communicate(overlap.exchange_wait.default, emit.chain, partials, closing, bounds, hops, *tail)
        received = emit.narrow(partials, 1, bounds[band], bounds[band + 1] - bounds[band])
        received = emit.reshape(received, [world_size - 1, *tools.shape(own)])
        total = summed(emit, own, received, reduce_op, dtype)
        slices.after = emit.communicate(overlap.exchange_send.default, emit.chain, result, total, bounds, band, *back)

    later = 1 if on_gpu(tools.value(collective.input).device) else 0
    computed: list[tuple[int, fx.Node, list[fx.Node]]] = []
    for band, block in enumerate(blocks):
        sent = []
        for step in range(world_size - 1):
            piece = slices.of_rank(step + 1, block)
            slices.after = emit.communicate(
                overlap.exchange_send.default, emit.chain, partials, piece, bounds, step * parts + band, *tail
            )
            sent.append(piece)
        computed.append((band, slices.of_rank(0, block), sent))
        if band >= later:
            return_band(*computed[band - later], newest=computed[-1][1])
    for left in computed[len(blocks) - later :]:
        return_band(*left, newest=computed[-1][1])
    _reduce_left_over(emit, nodes, slices, result, inner, reduce_op)
    emit.communicate(overlap.exchange_wait.default, emit.chain, result, [], bounds, list(range(parts)), *back)
    final = emit.convert(result, nodes.leaf_layout, nodes.layouts[nodes.computed[0]])
    return emit.contiguous(emit.reshape(final, tools.shape(collective.node)))


def _reduce_left_over(
    emit: StepEmitter, nodes: ReduceNodes, slices: Slices, result: fx.Node, inner: Size, reduce_op: str
) -> None:
    sharded = nodes.sharded
    body = emit.world_size * sharded.chunk
    left = sharded.size - body
    if isinstance(left, int) and left == 0:
        return
    rows = slices.rows(body, left)
    emit.communicate(
        overlap.reduce_tail.default, emit.chain, result, rows, body * inner, reduce_op, emit.group_name, emit.site
    )


def rewrite_gathered_output(emit: StepEmitter, nodes: ReduceNodes, parts: int) -> fx.Node:
    """Write the steps that gather the matmul's output. Returns the gathered tensor, in the collective's layout.
    ``parts``: the number of bands of this rank's rows."""
    collective = nodes.collectives[0]
    dtype = tools.dtype(collective.input)
    slices = Slices(emit, nodes)
    rows, *widths = nodes.padded_shape
    parts = part_count(rows, parts)
    cuts = pieces_of(rows, parts)
    inner = tools.numel(widths)
    bounds = [start * inner for start, _ in cuts] + [rows * inner]
    arguments = ("broadcast", emit.group_name, emit.site)
    buffer = emit.communicate(
        overlap.exchange_start.default,
        emit.chain,
        tools.shape(collective.node),
        bounds,
        dtype,
        *arguments,
        *emit.transport,
    )
    for band, (start, length) in enumerate(cuts):
        piece = slices.rows(start, length)
        slices.after = emit.communicate(
            overlap.exchange_send.default, emit.chain, buffer, piece, bounds, band, *arguments
        )
    emit.communicate(overlap.exchange_wait.default, emit.chain, buffer, [], bounds, list(range(parts)), *arguments)
    return buffer


__all__ = ["rewrite_all_reduce", "rewrite_gathered_output", "rewrite_reduce_scatter", "summed"]

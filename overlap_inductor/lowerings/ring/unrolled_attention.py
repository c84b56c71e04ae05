# SPDX-License-Identifier: Apache-2.0
"""Write ``all-gathers of keys and values -> attention`` as a ring of unrolled steps (Ring Attention, arXiv:2310.01889,
section 3). Keys and values travel while attention reads the shards that have arrived. ``r``: the rank::

    keys, values = gather_start(own keys), gather_start(own values)       # or one gather of both
    y[r], l[r]   = attention(q, keys[r], values[r], mask[:, r])           # while the first hop runs
    for step: gather_step(keys); gather_step(values)
              y[r - step - 1], l[r - step - 1] = attention(...)           # while the next hop runs
    m   = max(l)                                                          # l: log-sum-exp of each query's scores
    out = sum(exp(l[s] - m) * y[s] for s) / sum(exp(l[s] - m) for s)      # arXiv:1805.02867, in fp32

These are the steps of route ``ring``. On route ``bidirectional``, a step may also bring the shard of rank
``r + step + 1``. Up to rounding, ``out`` is the attention to all keys.
"""

from __future__ import annotations

import functools
import math
from operator import getitem

import torch
from torch import fx

from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import attention
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention_nodes import AttentionNodes
from overlap_inductor.sites.attention_nodes import GatheredOperand
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.transports import routes

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


Buffers = dict[fx.Node, fx.Node]
"""The buffer of each gather, by the gather's node."""


def rewrite(emit: StepEmitter, nodes: AttentionNodes, route: str) -> Replaced:
    """Write the ring's steps at the insertion point. ``route``: ``ring`` or ``bidirectional``."""
    where = (route, emit.group_name, emit.site)
    bounds = {c.node: [0, tools.numel(tools.shape(c.input))] for c in nodes.collectives}
    buffers = {
        c.node: emit.communicate(
            overlap.gather_start.default, emit.chain, c.input, bounds[c.node], *where, *emit.transport
        )
        for c in nodes.collectives
    }
    pieces = [_attend(emit, nodes, buffers, 0)]
    for hop, shifts in enumerate(routes.distances(route, emit.world_size)):
        for node, buffer in buffers.items():
            emit.communicate(overlap.gather_step.default, emit.chain, buffer, bounds[node], hop, *where)
        pieces += [_attend(emit, nodes, buffers, shift) for shift in shifts]
    out = _merged(emit, pieces, tools.dtype(nodes.attention.lhs), masked=nodes.attention.hides_keys)
    replaced = {node: out for node, number in nodes.attention.results().items() if number == 0}
    for collective in nodes.collectives:
        replaced |= dict.fromkeys((collective.wait, collective.node), buffers[collective.node])
    return replaced


def _attend(emit: StepEmitter, nodes: AttentionNodes, buffers: Buffers, shift: int) -> tuple[fx.Node, fx.Node]:
    """``(output, log-sum-exp)`` of the attention to the keys of rank ``r + shift``. The log-sum-exp is ``-inf`` for
    queries that see none of these keys."""
    key, value = (_shard(emit, operand, buffers, shift) for operand in (nodes.key, nodes.value))
    mask, sees_none = (_causal if nodes.attention.is_causal else _mask_of)(emit, nodes, shift)
    args, kwargs = attention.arguments_of_piece(nodes.attention, key, value, mask)
    results = emit.call(nodes.attention.node.target, *args, **kwargs)
    output, log_sum_exp = emit.call(getitem, results, 0), _sums(emit, nodes, emit.call(getitem, results, 1))
    if sees_none is not None:
        # For queries that see none of these keys, the op may return another log-sum-exp, such as 0. With -inf, the
        # keys get no weight.
        log_sum_exp = emit.call(aten.where.ScalarSelf, sees_none, -math.inf, log_sum_exp)
        if not nodes.attention.hidden_is_zero:
            rows = emit.call(aten.unsqueeze.default, sees_none, -1)
            output = emit.call(aten.where.ScalarSelf, rows, 0.0, output)
    return output, log_sum_exp


def _shard(emit: StepEmitter, operand: GatheredOperand, buffers: Buffers, shift: int) -> fx.Node:
    """The keys or values of rank ``r + shift``."""
    size = tools.shape(operand.collective.input)[0]
    shard = emit.take(buffers[operand.collective.node], 0, shift, size, 0, size)
    layout = operand.raw.without_rank()
    for cut in operand.cuts:
        atoms = [atom for dim in layout.refined().dims for atom in dim]
        at = next(i for i, atom in enumerate(atoms) if atom is cut.atom)
        shard = emit.narrow(emit.reshape(shard, [a.size for a in atoms]), at, cut.start, cut.left.size)
        layout = Layout(tuple((cut.left if i == at else atom,) for i, atom in enumerate(atoms)))
    rows = emit.convert(shard, layout, operand.layout.without_rank())
    # The attention op needs a last dim of stride 1. ``rows`` is a view of the shard, and may lack it.
    return rows if same_size(tools.value(rows).stride(-1), 1) else emit.contiguous(rows)


def _sums(emit: StepEmitter, nodes: AttentionNodes, log_sum_exp: fx.Node) -> fx.Node:
    """``log_sum_exp`` as ``[batch, heads, queries]``. One of CUDA's ops appends a dim of size 1, another pads the
    queries."""
    if len(tools.shape(log_sum_exp)) == 4:
        return emit.call(aten.squeeze.dim, log_sum_exp, -1)
    return emit.narrow(log_sum_exp, 2, 0, nodes.attention.sizes[1])


Hidden = tuple[fx.Node | None, fx.Node | None]
"""``(what is added to the scores of a rank's keys, which queries see none of these keys)``. Both are ``None`` without a
mask."""


def _mask_of(emit: StepEmitter, nodes: AttentionNodes, shift: int) -> Hidden:
    """The ``Hidden`` of the keys of rank ``r + shift``, from the columns of the program's mask."""
    mask = _columns(emit, nodes, shift)
    if mask is None:
        return None, None
    return mask, emit.call(aten.eq.Scalar, emit.call(aten.amax.default, mask, [-1]), -math.inf)


def _columns(emit: StepEmitter, nodes: AttentionNodes, shift: int) -> fx.Node | None:
    mask = nodes.attention.mask
    if mask is None or same_size(tools.shape(mask)[-1], 1):
        return mask
    whole, keys = tools.shape(mask), nodes.sharded_dims[0].chunk
    source = mask.args[0] if mask.target is aten.expand.default else mask
    if not same_size(tools.shape(source)[-1], whole[-1]):
        source = mask
    # Cut the mask before it is expanded: Inductor would write an expanded mask to memory.
    columns = emit.take(source, len(tools.shape(source)) - 1, shift, keys, 0, keys)
    return columns if source is mask else emit.call(aten.expand.default, columns, [*whole[:-1], keys])


def _causal(emit: StepEmitter, nodes: AttentionNodes, shift: int) -> Hidden:
    """``is_causal`` for the keys of rank ``r + shift``, as a mask. All ranks have the same graph, so the graph computes
    the mask from the rank at run time."""
    query = tools.value(nodes.attention.lhs)
    _, queries, total, _, _ = nodes.attention.sizes
    keys = nodes.sharded_dims[0].chunk

    def counted(size: Size) -> fx.Node:
        where = {"dtype": torch.int64, "device": query.device, "requires_grad": False}
        return emit.call(torch.ops.prims.iota.default, size, start=0, step=1, **where)

    rows, every = counted(queries), counted(total)
    columns, first = (emit.take(every, 0, shift, keys, 0, length) for length in (keys, 1))
    hidden = emit.call(aten.lt.Tensor, emit.call(aten.unsqueeze.default, rows, -1), columns)
    shown = emit.call(aten.full.default, [], 0.0, dtype=query.dtype, device=query.device)
    mask = emit.call(aten.where.ScalarSelf, hidden, -math.inf, shown)
    if nodes.attention.mask_dims == 4:
        mask = emit.call(aten.expand.default, mask, [*tools.shape(nodes.attention.lhs)[:2], queries, keys])
    return mask, emit.call(aten.lt.Tensor, rows, first)


def _merged(emit: StepEmitter, pieces: list[tuple[fx.Node, fx.Node]], dtype: torch.dtype, masked: bool) -> fx.Node:
    """The attention to all keys, from ``(output, log-sum-exp)`` for each rank's keys. If ``masked``, a query may see no
    key at all. The output of such a query is 0."""
    added = functools.partial(functools.reduce, lambda a, b: emit.call(aten.add.Tensor, a, b))
    sums = [log_sum_exp for _, log_sum_exp in pieces]
    wide = tools.dtype(sums[0])
    largest = functools.reduce(lambda a, b: emit.call(aten.maximum.default, a, b), sums)
    if masked:
        nothing = emit.call(aten.eq.Scalar, largest, -math.inf)
        largest = emit.call(aten.where.ScalarSelf, nothing, 0.0, largest)
    weights = [emit.call(aten.exp.default, emit.call(aten.sub.Tensor, s, largest)) for s in sums]
    total = added(weights)
    if masked:
        total = emit.call(aten.where.ScalarSelf, nothing, 1.0, total)
    convert = torch.ops.prims.convert_element_type.default
    outputs = [y if tools.dtype(y) is wide else emit.call(convert, y, wide) for y, _ in pieces]
    scaled = [
        emit.call(aten.mul.Tensor, y, emit.call(aten.unsqueeze.default, w, -1))
        for y, w in zip(outputs, weights, strict=True)
    ]
    out = emit.call(aten.div.Tensor, added(scaled), emit.call(aten.unsqueeze.default, total, -1))
    return out if dtype is wide else emit.call(convert, out, dtype)

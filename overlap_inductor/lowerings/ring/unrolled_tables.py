# SPDX-License-Identifier: Apache-2.0
"""Write ``lookups -> all-to-all`` and ``all-to-all -> gradients of tables`` as unrolled steps.

The results of one group of tables travel while the next group is looked up. ``r``: the rank::

    for each group of tables:
        p = lookups of the group, for the whole batch                       # after the previous group's sends
        for i in 1 .. W-1: send p[slice r + i] to rank r + i
    received[r] = all tables[slice r]
    ...                                                                     # what the program computes before it waits
    wait; out = received

With ``PooledNodes.by_rank`` (only plain embeddings), the ranks' slices are looked up one after the other::

    for i in 1 .. W-1, group: p = lookups of the group for slice r + i; send p to rank r + i
    received[r] = all lookups for slice r

In the backward graph, the gradients of one group of tables are computed while the next group travels::

    for each group of tables: for i in 1 .. W-1: send the group's part of dy[r + i] to rank r + i
    received[r] = dy[r]
    for each group of tables: wait for the group; gradients of its tables
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.ring.unrolled_exchange import ROUTE
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.lookup_nodes import GradientNodes
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.lookup_nodes import TableNodes
from overlap_inductor.sites.lookups import behind_reshapes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


class _Exchange:
    """The exchange of one site. The buffer has a slot for each rank. A slot has a block for each table.

    Attributes:
        groups: ``(first table, number of tables)`` of each group.
        bounds: offsets in a slot, in elements: where each group begins, and where the last one ends.
        sent: the piece of each hop, kept alive by the op that waits for the hop.
    """

    def __init__(self, emit: StepEmitter, nodes: TableNodes, parts: int) -> None:
        self.emit, self.nodes = emit, nodes
        self.groups = pieces_of(nodes.count, part_count(nodes.count, parts))
        self.bounds = [start * nodes.block_size for start, _ in self.groups] + [nodes.count * nodes.block_size]
        self.where = (ROUTE, emit.group_name, emit.site)
        self.sent: dict[int, fx.Node] = {}
        shape, dtype = [emit.world_size, self.bounds[-1]], tools.dtype(nodes.collective.input)
        self.buffer = emit.communicate(
            overlap.exchange_start.default, emit.chain, shape, self.bounds, dtype, *self.where, *emit.transport
        )

    def send(self, step: int, group: int, piece: fx.Node) -> fx.Node:
        """Send ``piece``, a group's blocks for rank ``r + step + 1``. Returns the token."""
        hop = step * len(self.groups) + group
        self.sent[hop] = piece
        return self.emit.communicate(
            overlap.exchange_send.default, self.emit.chain, self.buffer, piece, self.bounds, hop, *self.where
        )

    def keep(self, own: fx.Node) -> None:
        self.emit.call(overlap.exchange_keep.default, self.buffer, own, self.emit.group_name)

    def wait(self, hops: list[int], after: list[fx.Node]) -> None:
        """Wait for ``hops``, after the tensors ``after`` are computed."""
        held = [*(self.sent[hop] for hop in hops), *after]
        self.emit.communicate(
            overlap.exchange_wait.default, self.emit.chain, self.buffer, held, self.bounds, hops, *self.where
        )

    def hops_of(self, group: int) -> list[int]:
        return [step * len(self.groups) + group for step in range(self.emit.world_size - 1)]


def rewrite_pooled(emit: StepEmitter, nodes: PooledNodes, parts: int) -> Replaced:
    """Write the steps of ``lookups -> all-to-all``. ``parts``: the number of groups of tables."""
    exchange = _Exchange(emit, nodes, parts)
    steps = range(emit.world_size - 1)
    token: fx.Node | None = None
    (collective,) = nodes.collectives
    if nodes.by_rank:
        for step in steps:
            for group, (start, length) in enumerate(exchange.groups):
                piece = _looked_up(emit, nodes, range(start, start + length), step + 1, token)
                token = exchange.send(step, group, piece)
        exchange.keep(_looked_up(emit, nodes, range(nodes.count), 0, token))
    else:
        pooled: list[fx.Node] = []
        own: list[fx.Node] = []
        last = exchange.buffer
        for group, (start, length) in enumerate(exchange.groups):
            for table in range(start, start + length):
                pooled.append(_ordered(emit, nodes, table, token))
            last = max(last, *pooled[start:])
            with emit.graph.inserting_before(last.next):
                of_rank = _by_rank(emit, nodes, pooled[start:])
                for step in steps:
                    token = exchange.send(step, group, of_rank(step + 1))
                own.append(emit.reshape(of_rank(0), [length, nodes.block_size]))
                last = own[-1]
        with emit.graph.inserting_before(collective.node):
            exchange.keep(emit.call(overlap.after.default, _joined(emit, own), emit.chain))
    with emit.graph.inserting_before(collective.wait):
        exchange.wait(list(range(len(exchange.sent))), [])
        result = emit.convert(emit.reshape(exchange.buffer, nodes.wire.shape()), nodes.wire, nodes.received)
        result = emit.contiguous(emit.reshape(result, tools.shape(collective.wait)))
    return {collective.wait: result, collective.node: result}


def _looked_up(emit: StepEmitter, nodes: PooledNodes, tables: range, shift: int, token: fx.Node | None) -> fx.Node:
    """The blocks of ``tables`` for rank ``r + shift``, looked up after ``token``. Op ``after`` makes Inductor write
    them to memory, so no reader computes them again."""
    blocks = []
    for lookup in nodes.lookups[tables.start : tables.stop]:
        count = tools.numel(tools.shape(lookup.lhs)) // emit.world_size
        every = emit.reshape(lookup.lhs, [emit.world_size * count])
        theirs = emit.take(every, 0, shift, count, 0, count)
        rows = emit.call(aten.embedding.default, lookup.rhs, theirs, *lookup.node.args[2:], **lookup.node.kwargs)
        blocks.append(emit.reshape(rows, [1, nodes.block_size]))
    return emit.call(overlap.after.default, _joined(emit, blocks), token or emit.chain)


def _by_rank(emit: StepEmitter, nodes: PooledNodes, parts: list[fx.Node]) -> Callable[[int], fx.Node]:
    """A function of ``shift`` that returns the blocks for rank ``r + shift``. ``parts``: each table's results for the
    whole batch. If there are several tables, their blocks are copied, so that each rank's blocks are contiguous."""
    ranks, size, count = emit.world_size, nodes.block_size, len(parts)
    rows = behind_reshapes(parts[0])
    chunk = tools.shape(rows)[0]
    if count > 1:
        joined = emit.call(aten.cat.default, [emit.reshape(part, [1, ranks, size]) for part in parts])
        swapped = emit.call(aten.permute.default, joined, [1, 0, 2])
        rows, chunk = emit.call(overlap.packed.default, emit.reshape(swapped, [ranks * count, size])), ranks * count
    elif not isinstance(chunk, int) or chunk % ranks:
        rows, chunk = emit.reshape(rows, [ranks, size]), ranks
    return lambda shift: emit.take(rows, 0, shift, chunk // ranks, 0, chunk // ranks)


def _joined(emit: StepEmitter, blocks: list[fx.Node]) -> fx.Node:
    return blocks[0] if len(blocks) == 1 else emit.call(aten.cat.default, blocks)


def _ordered(emit: StepEmitter, nodes: PooledNodes, table: int, token: fx.Node | None) -> fx.Node:
    """``nodes.parts[table]``, looked up after ``token``. Without the edge from ``token``, Inductor may run all
    lookups before the first send."""
    lookup, part = nodes.lookups[table], nodes.parts[table]
    # Inductor computes a plain lookup and its pointwise ops in one kernel, whose last node gets the edge. For bags, the
    # first result of the lookup op gets the edge.
    node = behind_reshapes(part)
    if lookup.is_tuple:
        node = next(user for user in lookup.node.users if user.target is getitem and user.args[1] == 0)
    if token is None or node < token:
        return part
    with emit.graph.inserting_before(node.next):
        ordered = emit.call(overlap.after.default, node, token)
    for reader in node.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered):
        emit.values.keep(reader)
    return ordered if part is node else part


def rewrite_gradients(emit: StepEmitter, nodes: GradientNodes, parts: int) -> Replaced:
    """Write the steps of ``all-to-all -> gradients of tables``. ``parts``: the number of groups of tables."""
    exchange = _Exchange(emit, nodes, parts)
    size, count, steps = nodes.block_size, nodes.count, range(emit.world_size - 1)
    blocks = emit.reshape(emit.convert(nodes.source, nodes.source_layout, nodes.wire), [emit.world_size, count, size])
    if nodes.last_first:
        blocks = emit.call(torch.ops.prims.rev.default, blocks, [1])
    # Without ``packed``, Inductor would copy the rows again for each slice that is sent.
    rows = emit.call(overlap.packed.default, emit.reshape(blocks, [emit.world_size * count, size]))
    for group, cut in enumerate(exchange.groups):
        for step in steps:
            exchange.send(step, group, emit.take(rows, 0, step + 1, count, *cut))
    exchange.keep(emit.take(rows, 0, 0, count, 0, count))
    places = {node: count - 1 - table if nodes.last_first else table for node, table in nodes.slices.items()}
    replaced: dict[fx.Node, fx.Node] = {}
    computed: list[fx.Node] = []
    for group, (start, length) in enumerate(exchange.groups):
        # Waits stand in the order of the groups, so this wait precedes the first reader of this or a later group.
        later = [node for node, place in places.items() if place >= start]
        first = min((min(node.users, default=node) for node in later), default=emit.graph.output_node())
        with emit.graph.inserting_before(first):
            done = [m.node for m in nodes.lookups if m.node < first and m.node not in computed]
            exchange.wait(exchange.hops_of(group), done)
            computed += done
            for node in later:
                if places[node] < start + length:
                    replaced[node] = _read(emit, nodes, exchange.buffer, places[node], node)
    return replaced


def _read(emit: StepEmitter, nodes: GradientNodes, buffer: fx.Node, place: int, old: fx.Node) -> fx.Node:
    """The blocks with index ``place`` in every slot. They replace ``old``, the gradient of one table's result."""
    blocks = emit.reshape(buffer, [emit.world_size, nodes.count, nodes.block_size])
    table: Any = emit.narrow(blocks, 1, place, 1)
    own = Layout(nodes.block.refined().dims)
    return emit.reshape(emit.convert(emit.reshape(table, own.shape()), own, nodes.read), tools.shape(old))

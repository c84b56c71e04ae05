# SPDX-License-Identifier: Apache-2.0
"""Find an exchange of keys and values that can run under the attention to the same keys and values.

Ring attention, for example torch's context parallelism, attends to one rank's keys at a time. Meanwhile a rank passes
its block on (``all_to_all``), or gathers all blocks (``all_gather``)::

    block = cat([flatten(k), flatten(v)])
    moved = all_to_all_single(block, ...)               # to the next rank
    y0    = scaled_dot_product_attention(q, k, v)       # needs nothing of ``moved``
    k, v  = pieces of wait_tensor(moved)
    y1    = scaled_dot_product_attention(q, k, v); merge y1 into y0

Without the overlap pass, Inductor may start the exchange after ``y0``. The overlap pass starts the exchange before
``y0``, and waits for it after ``y0``.
"""

from __future__ import annotations

import types

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites import attention
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention import AttentionNode
from overlap_inductor.sites.held_nodes import HeldNodes
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.torch_compat import operators

NAMESPACES = ("aten", "prims", *operators.FUNCTIONAL_COLLECTIVES)
"""Namespaces in which an op's name shows whether it is a collective."""
STEPS = 12
"""An exchange is found only if at most this many nodes stand between the keys and the exchange. Between the keys and
the attention (``attention.readers``), there must be fewer than this many nodes."""


class AttentionExchange:
    """Pattern ``attention beside an exchange of its keys and values`` (see ``Pattern``). Separate exchanges of keys and
    of values are one site, at the first exchange."""

    early = False
    example = None

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        if collective.wait is collective.node:
            return Miss()  # nothing can run beside an op that waits for its own result
        taken = search.owned()
        found = [a for a in _attentions(collective) if _independent(a, collective)]
        reader = next((a for a in found if a.node not in taken), None)
        if reader is None:
            return Miss([_backward(collective)] if _feeds_backward(collective) else [])
        nodes = HeldNodes(reader, [collective, *_beside(collective, reader, search)])
        if (reason := _why_not_moved(nodes)) is not None:
            return Miss([reason])
        search.merged.update(c.node for c in nodes.exchanges)
        return Match(nodes)


def _moves(node: fx.Node) -> bool:
    """Whether ``node`` only moves, copies, casts or selects elements."""
    if node.op != "call_function":
        return False
    joined = node.target is tools.aten.cat.default or node.target in tools.SPLITS
    views = tools.is_reshape(node) or tools.permutation(node) is not None or node.target is tools.aten.select.int
    return joined or views or tools.is_cast(node) or piece_of(node) is not None


def _held(collective: CollectiveNode) -> set[fx.Node]:
    """The exchange's input, and the tensors of which the input is a copy."""
    found, frontier = {collective.input}, [collective.input]
    for _ in range(STEPS):
        reached = {source for node in frontier if _moves(node) for source in node.all_input_nodes} - found
        found |= reached
        frontier = list(reached)
    return found


def _attentions(collective: CollectiveNode) -> list[AttentionNode]:
    """In graph order, the attention ops with 4-D queries whose keys or values the exchange sends."""
    found = {reader.node: reader for reader in attention.readers(_held(collective), _moves, STEPS)}
    return [found[node] for node in sorted(found) if len(tools.shape(found[node].lhs)) == 4]


def _independent(reader: AttentionNode, collective: CollectiveNode) -> bool:
    return not tools.depends_on(reader.node, collective.node, {}) and not tools.depends_on(
        collective.node, reader.node, {}
    )


def _beside(first: CollectiveNode, reader: AttentionNode, search: Search) -> list[CollectiveNode]:
    """The later exchanges of the same kind and group that can run under the attention together with ``first``."""
    found: list[CollectiveNode] = []
    unavailable = {*search.merged, *search.taken()}
    for node, kind, other in search.collectives.values():
        if kind != first.kind or not isinstance(other, CollectiveNode) or not first.node < node:
            continue
        if other.group_name != first.group_name or node in unavailable or other.wait is node:
            continue
        # ``_independent`` is slow, so it comes second.
        if reader.node not in [a.node for a in _attentions(other)] or not _independent(reader, other):
            continue
        together = HeldNodes(reader, [first, *found, other])
        if not any(tools.depends_on(node, c.node, {}) for c in (first, *found)) and _why_not_moved(together) is None:
            found.append(other)
    return found


def _why_not_moved(nodes: HeldNodes) -> Reason | None:
    """Why an exchange cannot start before the attention, or why its wait cannot stand behind the attention. ``None``
    if both are possible."""
    late, early = nodes.late_starts(), nodes.early_readers()
    where = nodes.attention.node.name
    if late and early:
        text = f"{late[0].node.name} starts after {where}, but {early[0].name} takes the result of another exchange"
        return Reason("hoist", f"{text} before {where}; an exchange can move ahead of it or a wait behind it, not both")
    if late:
        # All ranks must issue a group's collectives in one order. But a rank without this attention does not move its
        # exchange. So no exchange moves past another collective of its group.
        node = nodes.attention.node
        own = {c.node for c in nodes.exchanges}
        while (node := node.next) is not late[-1].node:
            if collectives.group_of(node) == late[0].group_name and not operators.is_wait(node) and node not in own:
                text = f"{node.name} is a collective of the same group between {where} and {late[-1].node.name}"
                return Reason("hoist", f"{text}; expected the exchange of keys and values to come first")
            if _may_hold_collectives(node):
                text = f"{node.name} ({node.target}) stands between {where} and {late[-1].node.name}"
                return Reason("hoist", f"{text} and may issue collectives; expected the exchange to come first")
        for exchange in late:
            if (reader := _later_reader(exchange, nodes.attention.node)) is not None:
                # Inductor may let ``reader`` overwrite its operand, which the exchange may still be sending.
                text = f"{reader.name} reads what {exchange.node.name} sends, between {where} and the exchange"
                return Reason("hoist", f"{text}; expected only views, copies and attention there")
    waits = {wait for c in nodes.exchanges for wait in c.chain()}
    fixed = next((n for n in early if n not in waits and not _may_sink(n)), None)
    if fixed is not None:
        text = f"{fixed.name} ({fixed.target}) reads the exchanged tensor before {where} and cannot be moved behind it"
        return Reason("hoist", text)
    return None


def _may_hold_collectives(node: fx.Node) -> bool:
    """Whether ``node`` is a nested region, or an op that may issue a collective inside."""
    if node.op != "call_function" or isinstance(node.target, types.BuiltinFunctionType | types.FunctionType):
        return node.op == "call_module"
    return operators.qualified_name(node)[0] not in NAMESPACES


def _later_reader(exchange: CollectiveNode, after: fx.Node) -> fx.Node | None:
    """A node between ``after`` and the exchange that computes with the memory that the exchange sends, or
    ``None``."""

    def is_view(node: fx.Node) -> bool:
        viewed = node.target is tools.aten.select.int or tools.is_reshape(node) or tools.permutation(node) is not None
        return node.op == "call_function" and viewed

    root = exchange.input
    while is_view(root):
        root = root.all_input_nodes[0]
    shared, frontier = {root}, [root]
    while frontier:
        for user in frontier.pop().users:
            if is_view(user) and user not in shared:
                shared.add(user)
                frontier.append(user)
            elif after < user < exchange.node and not _moves(user) and attention.parse(user) is None:
                return user
    return None


def _may_sink(node: fx.Node) -> bool:
    collective = operators.is_functional_collective(node) or operators.is_wait(node)
    return not collective and not node.is_impure() and not operators.is_mutable(node)


def _feeds_backward(collective: CollectiveNode) -> bool:
    """Whether a backward op of attention reads, or computes, what the exchange sends."""
    near = _held(collective)
    readers = {user for node in near for user in node.users}
    sources = {source for node in near for source in node.all_input_nodes}
    further = {user for node in readers for user in node.users} | {i for node in sources for i in node.all_input_nodes}
    return any("attention" in str(n.target) and "backward" in str(n.target) for n in readers | sources | further)


def _backward(collective: CollectiveNode) -> Reason:
    text = f"{collective.node.name} moves keys, values or their gradients beside the backward op of attention"
    return Reason("matmul_form", f"{text}; this version moves exchanges under forward attention only")

"""Choose where a gather's steps are written: after all operands of its matmuls, and before the first use of a result.

By default the steps stand at the gather, and the nodes that compute the other operands are moved up to it. If those may
not be moved, the whole site sinks to the first use of its results. Activation checkpointing needs that: a weight's
gradient reads activations that must be gathered again first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import GatherNodes


@dataclass(frozen=True)
class Placement:
    """A place for the steps. Before ``anchor`` stand the ``hoisted`` nodes, which move up, then the ``sunk`` nodes,
    which move down (both in graph order), then the steps. ``operands``: what the steps read."""

    anchor: fx.Node
    sunk: list[fx.Node]
    hoisted: list[fx.Node]
    operands: list[fx.Node]

    @property
    def obstacle(self) -> fx.Node | None:
        """A node among ``hoisted`` that may not be moved or reads a sunk node; ``None`` if there is none."""
        sunk = set(self.sunk)
        return next((n for n in self.hoisted if not _movable(n) or not sunk.isdisjoint(n.all_input_nodes)), None)

    def apply(self) -> None:
        """Move the nodes."""
        for node in (*self.hoisted, *self.sunk):
            self.anchor.prepend(node)


def places(nodes: GatherNodes) -> list[Placement]:
    """Both placements in the graph as it is now, the better one first: at the gather, and at the first use of the
    site's results."""
    gather = nodes.collective.node
    members = {gather, nodes.collective.wait, *between(nodes), *(c.matmul.node for c in nodes.consumers)}
    users = {user for member in members for user in member.users} - members
    first_use = min(users)
    operands = _operands(nodes)
    return [
        Placement(gather, [], _needed_behind(operands, gather), operands),
        Placement(
            first_use, sorted(n for n in members if n < first_use), _needed_behind(operands, first_use), operands
        ),
    ]


def place(nodes: GatherNodes) -> Placement:
    """The first placement without obstacle in the graph as it is now; if both have one, the placement at the gather."""
    found = places(nodes)
    return next((p for p in found if p.obstacle is None), found[0])


def _movable(node: fx.Node) -> bool:
    return node.op != "call_function" or not (node.is_impure() or "_c10d_functional" in str(node.target))


def _operands(nodes: GatherNodes) -> list[fx.Node]:
    """What the steps read besides the gathered shards."""
    found = [n for c in nodes.consumers for n in (c.other_node, c.matmul.bias, *c.matmul.scales()) if n is not None]
    found += nodes.epilogue.externals
    # View-like nodes are written again for the pieces, so their size arguments are not needed, nor are the splits that
    # a cat's pieces come from.
    inside = between(nodes)
    copied = [n for n in sorted(inside) if n not in nodes.through]
    read = [(i, n) for n in copied for i in n.all_input_nodes if i not in inside and i is not nodes.collective.wait]
    return found + [i for i, n in read if n in nodes.layouts or not tools.is_tensor(i) or tools.is_scalar_like(i)]


def _needed_behind(operands: list[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """The operands, and the nodes that they are computed from, that stand at ``anchor`` or after it, in graph order."""
    wanted: set[fx.Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node not in wanted and not node < anchor:
            wanted.add(node)
            pending += node.all_input_nodes
    return sorted(wanted)


def between(nodes: GatherNodes) -> set[fx.Node]:
    """The nodes between the wait and the matmuls: they depend on the wait and lead to a gathered operand."""
    known: dict[fx.Node, bool] = {}
    found: set[fx.Node] = set()
    pending = [c.operand_node for c in nodes.consumers]
    while pending:
        node = pending.pop()
        if node in found or node is nodes.collective.wait or not tools.depends_on(node, nodes.collective.wait, known):
            continue
        found.add(node)
        pending += node.all_input_nodes
    return found

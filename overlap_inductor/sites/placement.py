# SPDX-License-Identifier: Apache-2.0
"""``Placement``: a place for a site's steps, behind all their operands and before the first use of a result.

By default, the steps of a site with a gather are written at the gather, and the nodes that compute other operands are
moved up. If these nodes must not be moved, the whole site is moved down to the first use of its results. This happens
with activation checkpointing: in the backward graph, collectives may compute a gradient operand after the gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from overlap_inductor.torch_compat import operators


@dataclass(frozen=True)
class Placement:
    """A place for the steps. The order in the graph becomes: ``hoisted``, ``sunk``, the steps, ``anchor``. With
    ``SiteNodes.read_in_place``, the steps come before ``sunk``.

    Attributes:
        anchor: the node before which the steps are written.
        sunk: the nodes that are moved down, in graph order.
        hoisted: the nodes that compute ``operands`` and are moved up, in graph order.
        operands: the nodes that the steps read.
    """

    anchor: fx.Node
    sunk: list[fx.Node]
    hoisted: list[fx.Node]
    operands: list[fx.Node]

    @property
    def obstacle(self) -> fx.Node | None:
        """A node of ``hoisted`` that must not be moved, or that reads a node of ``sunk``; else ``None``."""
        sunk = set(self.sunk)
        return next((n for n in self.hoisted if not movable(n) or not sunk.isdisjoint(n.all_input_nodes)), None)

    def apply(self) -> None:
        for node in (*self.hoisted, *self.sunk):
            self.anchor.prepend(node)


def movable(node: fx.Node) -> bool:
    """Whether ``node`` has no effect besides its result, and is no collective."""
    return node.op != "call_function" or not (node.is_impure() or operators.is_functional_collective(node))


def needed_behind(operands: list[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """``operands`` and the nodes that compute them, in graph order. Nodes before ``anchor`` are left out."""
    wanted: set[fx.Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node not in wanted and not node < anchor:
            wanted.add(node)
            pending += node.all_input_nodes
    return sorted(wanted)

# SPDX-License-Identifier: Apache-2.0
"""``Placement``: a place for a site's steps, after all operands of its matmuls and before the first use of a result.

By default the steps stand at the gather, and the nodes that compute the other operands are moved up to it. If those may
not be moved, the whole site sinks to the first use of its results. Activation checkpointing needs that: a weight's
gradient reads activations that must be gathered again first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from overlap_inductor.torch_compat import operators


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


def _movable(node: fx.Node) -> bool:
    return node.op != "call_function" or not (node.is_impure() or operators.is_functional_collective(node))


def needed_behind(operands: list[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """The nodes at ``anchor`` or after it that ``operands`` are computed from, ``operands`` included, in graph
    order."""
    wanted: set[fx.Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node not in wanted and not node < anchor:
            wanted.add(node)
            pending += node.all_input_nodes
    return sorted(wanted)

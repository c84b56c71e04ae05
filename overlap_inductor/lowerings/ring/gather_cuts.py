# SPDX-License-Identifier: Apache-2.0
"""Where a shard of a gathered tensor can be cut into sub-chunks, and which dim of a matmul the sub-chunks cut."""

from __future__ import annotations

from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Size


def leading_atom(nodes: GatherNodes) -> Atom | None:
    """The outermost dim of a shard in memory. A shard is cut along this dim, so that sub-chunks are contiguous."""
    atoms = [a for a in nodes.raw.flat() if not a.rank]
    return atoms[0] if atoms else None


def can_cut(nodes: GatherNodes) -> bool:
    """Whether a sub-chunk is a rectangular block of every operand, and of every tensor from which an operand is
    computed."""
    lead = leading_atom(nodes)
    return (
        lead is not None
        and all(axis_of(c, lead) is not None for c in nodes.consumers)
        and row_pieces.can_cut(nodes, lead)
    )


def axis_of(consumer: GatherConsumer, lead: Atom) -> tuple[str, int, Size] | None:
    """The place of ``lead`` in the operand: ``(chunk | outer | cross, dim, rows that one index of the atom spans)``, as
    in ``row_pieces.position``. ``None`` if the operand cannot be cut there."""
    for dim, atoms in enumerate(consumer.layout.refined().dims):
        if any(a is lead for a in atoms):
            found = row_pieces.position(atoms, lead)
            # A cut through a contracted dim that is not gathered would give partial sums, but each piece of the result
            # must be complete.
            if found is None or found[0] == "cross" and consumer.matmul.role(consumer.operand, dim) == "K":
                return None
            return found[0], dim, found[1]
    return None


def crossed_role(nodes: GatherNodes, consumer: GatherConsumer) -> str | None:
    """The role of the matmul's dim that sub-chunks cut; ``None`` if it is the gathered dim, or no dim can be cut."""
    lead = leading_atom(nodes)
    axis = axis_of(consumer, lead) if lead is not None else None
    return consumer.matmul.role(consumer.operand, axis[1]) if axis is not None and axis[0] == "cross" else None

# SPDX-License-Identifier: Apache-2.0
"""Where a shard of a gathered tensor can be cut into sub-chunks, and which dim of a matmul the sub-chunks cut."""

from __future__ import annotations

from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Size


def leading_atom(nodes: GatherNodes) -> Atom | None:
    """The outermost atom of a shard in memory. (An atom is a dim, or a factor of a dim: ``layouts.Atom``.) A shard is
    cut along this atom, so that sub-chunks are contiguous."""
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
    """``(place, dim, rows that one index of lead spans)`` in the operand. ``None`` if the operand cannot be cut along
    ``lead``. ``place`` says where ``lead`` is (``row_pieces.position``):

    * ``chunk``: in the gathered dim, right after the atom that counts the ranks.
    * ``outer``: in the gathered dim, as its first atom, before the atom that counts the ranks.
    * ``cross``: in another dim, as its first atom.
    """
    for dim, atoms in enumerate(consumer.layout.refined().dims):
        if any(a is lead for a in atoms):
            found = row_pieces.position(atoms, lead)
            # If the gathered dim is contracted, the pieces' results are added up. If another dim is gathered, each
            # piece gives a part of the result, and a cut through the contracted dim would leave this part incomplete.
            if found is None or found[0] == "cross" and consumer.matmul.role(consumer.operand, dim) == "K":
                return None
            return found[0], dim, found[1]
    return None


def crossed_role(nodes: GatherNodes, consumer: GatherConsumer) -> str | None:
    """The role (``M``, ``N``, ``K`` or ``B``) of the matmul's dim that sub-chunks cut. ``None`` if this dim is the
    gathered one, or if no dim can be cut."""
    lead = leading_atom(nodes)
    axis = axis_of(consumer, lead) if lead is not None else None
    return consumer.matmul.role(consumer.operand, axis[1]) if axis is not None and axis[0] == "cross" else None

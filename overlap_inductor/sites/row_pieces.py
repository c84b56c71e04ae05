# SPDX-License-Identifier: Apache-2.0
"""Write pieces of a region after a gather (``RowPieces``) or a matmul (``BandPieces``). The ops of the region are
row-wise: each row of a result depends only on the same row of the inputs (``sites.row_wise``). After a gather, a piece
is computed from one rank's shard or a part of it.

Contract: nodes are written at the emitter's insertion point. Views get the piece's shape, other ops are copied, and
tensors from elsewhere are cut to the piece's rows. After a gather, on rank r::

    raw   = rows of rank r + shift, part p, of the gathered buffer
    piece = op(piece of the gathered input, rows of the other input that belong to rank r + shift and part p)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.banded_nodes import BandedNodes
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.step_emitter import Block
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators

aten = tools.aten


def position(atoms: tuple[Atom, ...], lead: Atom) -> tuple[str, Size] | None:
    """``(place, rows)``: where the atom ``lead`` lies in a dim of ``atoms``, and how many rows one index of it spans.
    Shards are cut into parts along ``lead``. (An atom is a dim or a factor of a dim. The rank atom counts the ranks:
    ``sites.layouts``.)

    - ``chunk``: right after the rank atom;
    - ``outer``: first in a dim, with the rank atom behind it. ``rows`` is then the number of indices of the atoms
      between ``lead`` and the rank atom;
    - ``cross``: first in a dim without a rank atom.

    ``None`` if a part is not a run of consecutive rows of the dim.
    """
    present = [a for a in atoms if a.rank or not (isinstance(a.size, int) and a.size == 1)]
    rank = next((i for i, a in enumerate(present) if a.rank), None)
    if rank is None:
        return ("cross", product(present[1:])) if present[0] is lead else None
    if present[rank + 1 : rank + 2] and present[rank + 1] is lead:
        return "chunk", product(present[rank + 2 :])
    return ("outer", product(present[1:rank])) if present[0] is lead and rank else None


def place_of(layout: Layout, lead: Atom) -> int | None:
    """The dim along which parts that were cut along ``lead`` can be joined, or ``None``."""
    for dim, atoms in enumerate(layout.refined().dims):
        if any(a is lead for a in atoms):
            found = position(atoms, lead)
            return dim if found is not None and found[0] != "outer" else None
    return None


def can_cut(nodes: GatherNodes, lead: Atom) -> bool:
    """Whether every op of the region can be computed on a part of a shard that is cut along ``lead``."""
    if any(leaf is lead for atom in nodes.whole for leaf in atom.leaves()):
        return False
    dims = (
        nodes.layouts[user].refined().dims[d] for node, user in _externals(nodes) for d in aligned(node, user).values()
    )
    return all(position(dim, lead) is not None for dim in dims if any(a is lead for a in dim))


def _externals(nodes: GatherNodes) -> list[tuple[fx.Node, fx.Node]]:
    """Each pair ``(tensor from elsewhere, region node that reads it)``."""
    return [
        (n, user)
        for user in nodes.layouts
        if user not in nodes.through
        for n in tools.tensor_inputs(user)
        if user is not nodes.collective.wait and n not in nodes.layouts
    ]


def aligned(node: fx.Node, user: fx.Node) -> dict[int, int]:
    """``{dim of node: dim of user}``, without dims that ``user`` broadcasts or joins (``cat``)."""
    mine, theirs = tools.shape(node), tools.shape(user)
    joined = operators.argument(user, "dim") % len(theirs) if user.target is aten.cat.default else None
    dims = ((d, d + len(theirs) - len(mine)) for d in range(len(mine)))
    return {d: at for d, at in dims if at != joined and not (isinstance(mine[d], int) and mine[d] == 1)}


class RowPieces:
    """The pieces that are computed from the shard of rank ``r + shift``, or from a part of it.

    Args:
        raw: the node of the part of the shard that has ``length`` indices of ``lead``, from index ``start`` on. Without
            ``lead``, the node of the whole shard.
        order: layout of ``raw``.
        shift: taken modulo the number of ranks.
        lead: the atom along which the shard is cut, or ``None``.
    """

    nodes: GatherNodes | BandedNodes
    lead: Atom | None

    def __init__(
        self,
        emit: StepEmitter,
        nodes: GatherNodes,
        raw: fx.Node,
        order: Layout,
        shift: int,
        lead: Atom | None = None,
        start: Size = 0,
        length: Size = 0,
    ) -> None:
        self.emit, self.nodes, self.shift = emit, nodes, shift
        self.lead, self.start, self.length = lead, start, length
        self.sizes = {id(lead): length} if lead is not None else {}
        wait = nodes.collective.wait
        self.done: dict[fx.Node, fx.Node] = {
            wait: emit.convert(raw, order, nodes.layouts[wait].without_rank(), self.sizes)
        }

    def of(self, node: fx.Node) -> fx.Node:
        """The piece of ``node``, in its layout without the rank atom. The first call writes the piece."""
        if node not in self.done:
            layouts, through = self.nodes.layouts, self.nodes.through
            if node in through:
                source = layouts[through[node]].without_rank()
                self.done[node] = self.emit.convert(
                    self.of(through[node]), source, layouts[node].without_rank(), self.sizes
                )
            else:
                copied = self.emit.graph.node_copy(
                    node, lambda n: self.of(n) if n in layouts else self._external(n, node)
                )
                self.done[node] = self.emit.annotate(copied)
        return self.done[node]

    def _external(self, node: fx.Node, user: fx.Node) -> fx.Node:
        if not tools.is_tensor(node):
            return node
        for dim, at in aligned(node, user).items():
            node = self._cut(node, dim, self.nodes.layouts[user].refined().dims[at])
        return node

    def _cut(self, x: fx.Node, dim: int, atoms: tuple[Atom, ...]) -> fx.Node:
        at: Any = position(atoms, self.lead) if self.lead is not None and any(a is self.lead for a in atoms) else None
        kind, unit = at or ("whole", 1)
        start, length = self.start * unit, self.length * unit
        if not any(a.rank for a in atoms):
            return self.emit.narrow(x, dim, start, length) if kind == "cross" else x
        sharded = ShardedDim.of(Layout((atoms,)))
        block = Block.whole(sharded)
        if kind == "chunk":
            block = Block(start, length, 0, sharded.outer)
        elif kind == "outer":
            block = Block(0, sharded.chunk, start, length)
        return self.emit.take_sharded(x, dim, sharded, self.shift, block)


class BandPieces(RowPieces):
    """The pieces of a region behind a matmul (``sites.banded_nodes``), computed from some of the matmul's rows.

    Args:
        done: ``{the matmul's node: the piece of its result}``.
        lead: the atom along which the matmul's rows are cut.
        start, length: the piece has ``length`` indices of ``lead`` from ``start`` on.
    """

    def __init__(
        self, emit: StepEmitter, nodes: BandedNodes, done: dict[fx.Node, fx.Node], lead: Atom, start: Size, length: Size
    ) -> None:
        self.emit, self.nodes, self.done, self.replaced = emit, nodes, done, nodes.externals
        self.lead, self.start, self.length, self.sizes = lead, start, length, {id(lead): length}

    def of(self, node: fx.Node) -> fx.Node:
        if node not in self.done and node in self.replaced and node in self.nodes.layouts:
            # Another site's epilogue now computes all rows of this node, so the piece is cut from them.
            piece = node
            for dim, atoms in enumerate(self.nodes.layouts[node].refined().dims):
                piece = self._cut(piece, dim, atoms)
            self.done[node] = piece
        return super().of(node)

    def _cut(self, x: fx.Node, dim: int, atoms: tuple[Atom, ...]) -> fx.Node:
        if not any(a is self.lead for a in atoms):
            return x
        unit: Any = position(atoms, self.lead)[1]  # type: ignore[index,arg-type]
        return self.emit.narrow(x, dim, self.start * unit, self.length * unit)

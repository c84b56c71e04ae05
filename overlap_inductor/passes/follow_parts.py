# SPDX-License-Identifier: Apache-2.0
"""``PartFollower`` says which elements of an all-gather's result a node holds.

Only views, pieces (slices, selections, outputs of splits) and joins of pieces may stand between the gather and the
node. One gather may move several tensors, and each reader takes a part. In this example, each of R ranks has s keys
and values::

    both = wait_tensor(all_gather(stack([k, v])))           # [R * 2, batch, heads, s, width]
    keys = cat([select(piece, 0, 0) for piece in split(both, 2)], dim=2)
    ->  keys holds the first of the 2 tensors in each rank's shard; the ranks' parts follow each other in dim 2
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from operator import getitem

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention_nodes import Cut
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.torch_compat import operators

aten = tools.aten


@dataclass(frozen=True)
class Part:
    """What a node holds.

    Attributes:
        layout: the atoms of each dim of the node. An atom is a dim, or a factor of a dim (``layouts.Atom``). These
            atoms are those of the gathered tensor, except that a cut replaces an atom by the part that is left.
        cuts: the cuts that take the elements from each rank's shard, in the order in which they are made.
        rank: the rank whose elements the node holds, or ``None`` for all ranks.
    """

    layout: Layout
    cuts: tuple[Cut, ...] = ()
    rank: int | None = None


class PartFollower:
    """Finds what the nodes between one gather and one reader hold. Each reader needs a ``PartFollower`` of its own,
    because a reshape splits atoms, which would change the layouts of other readers."""

    def __init__(self, collective: CollectiveNode) -> None:
        self.collective = collective
        self.raw = Layout.gathered(tools.shape(collective.input), collective.world_size)
        self._rank = self.raw.dims[0][0]
        self._found: dict[fx.Node, Part | Reason] = {collective.wait: Part(self.raw)}
        self._cuts: dict[tuple[Atom, Size, Size], Cut] = {}
        self._depends: dict[fx.Node, bool] = {}

    def part(self, node: fx.Node) -> Part | Reason:
        """The part that ``node`` holds, or a ``Reason`` why ``node`` holds none. ``node`` must depend on the gather."""
        if node not in self._found:
            try:
                self._found[node] = self._read(node)
            except LayoutError as error:
                self._found[node] = Reason("layout", f"{node.name}: {error}")
        return self._found[node]

    def _read(self, node: fx.Node) -> Part | Reason:
        if node.target is aten.cat.default:
            return self._joined(node)
        view = tools.is_reshape(node) or node.target in tools.SAME or tools.permutation(node) is not None
        index = _index_of(node)
        piece = None if view or index is not None else piece_of(node)
        if not view and index is None and piece is None:
            return self._obstacle(node)
        source = piece.base if piece is not None else index[0] if index is not None else node.all_input_nodes[0]
        part = self.part(source)
        if isinstance(part, Reason):
            return part
        if index is not None:
            _, dim, at = index
            taken = self._taken(part, dim, at, 1)
            dims = taken.layout.refined().dims
            return replace(taken, layout=Layout(dims[:dim] + dims[dim + 1 :]))
        if piece is not None:
            if piece.step != 1:
                return self._obstacle(node)
            return self._taken(part, piece.dim % len(part.layout.dims), piece.start, piece.length)
        if (order := tools.permutation(node)) is not None:
            return replace(part, layout=part.layout.permute(order))
        return replace(part, layout=part.layout.reshape(tools.shape(node))) if tools.is_reshape(node) else part

    def _obstacle(self, node: fx.Node) -> Reason:
        """Why ``node`` holds no part. If an input of ``node`` holds no part either, the reason is the input's."""
        for source in node.all_input_nodes:
            if tools.depends_on(source, self.collective.wait, self._depends):
                found = self.part(source)
                if isinstance(found, Reason):
                    return found
        text = f"{node.name} ({node.target}) is between the all-gather and the attention"
        expected = "expected only views, pieces and joins of the keys and values that were gathered"
        return Reason("op_between", f"{text}; {expected}")

    def _taken(self, part: Part, dim: int, start: Size, length: Size) -> Part:
        """The part that holds ``length`` indices of ``dim`` from ``start`` on. If the first atom of ``dim`` is the rank
        atom, a part is the whole dim or one rank's shard. If not, a part is the whole dim or whole blocks. A block is
        the indices of ``dim`` that belong to one index of its first atom.

        Raises:
            LayoutError: the indices are anything else, or blocks are cut at symbolic sizes.
        """
        dims = list(part.layout.refined().dims)
        atoms = [a for a in dims[dim] if a.rank or not same_size(a.size, 1)]
        if same_size(length, product(atoms)):
            return part
        inner = product(atoms[1:])
        if atoms[0].rank:
            for rank in range(self.collective.world_size):
                if same_size(start, rank * inner) and same_size(length, inner):
                    dims[dim] = tuple(atoms[1:])
                    return Part(Layout(tuple(dims)), part.cuts, rank)
            text = f"{length} indices of dim {dim} from {start} on are not the shard of one rank"
            raise LayoutError(f"{text}; expected one whole shard of {inner} indices")
        sizes = (start, length, inner)
        text = f"{length} indices of dim {dim} from {start} on"
        if not all(isinstance(n, int) for n in sizes):
            raise LayoutError(f"{text} are taken from blocks of {inner}; expected sizes that are known at compile time")
        if start % inner or length % inner:
            raise LayoutError(f"{text} are not whole blocks of {inner}")
        key = (atoms[0], start // inner, length // inner)
        cut = self._cuts.setdefault(key, Cut(*key[:2], Atom(key[2])))
        dims[dim] = (cut.left, *atoms[1:])
        return Part(Layout(tuple(dims)), (*part.cuts, cut), part.rank)

    def _joined(self, cat: fx.Node) -> Part | Reason:
        """The part that ``cat`` holds. ``cat`` must join the same part of each shard, in the order of the ranks."""
        parts = []
        for source in cat.args[0]:
            if not tools.depends_on(source, self.collective.wait, self._depends):
                return self._obstacle(cat)
            part = self.part(source)
            if isinstance(part, Reason):
                return part
            parts.append(part)
        ranks, first = [part.rank for part in parts], parts[0]
        if ranks != list(range(self.collective.world_size)):
            text = f"{cat.name} joins shards of the ranks {ranks}" if None not in ranks else f"{cat.name} joins pieces"
            return Reason("not_plain_gather", f"{text}; expected one shard of each rank, in order")
        if any(part.cuts != first.cuts or not part.layout.same_elements(first.layout) for part in parts):
            return Reason(
                "not_plain_gather",
                f"{cat.name} joins different parts of the ranks' shards; expected the same part of each shard",
            )
        dim = operators.argument(cat, "dim") % len(tools.shape(cat))
        dims = list(first.layout.refined().dims)
        dims[dim] = (self._rank, *dims[dim])
        return Part(Layout(tuple(dims)), first.cuts)


def _index_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """``(tensor, dim, index)`` if ``node`` selects one index of a dim and drops this dim; else ``None``."""
    if node.target is aten.select.int:
        source, dim, index = node.args
    elif node.target is getitem and isinstance(node.args[0], fx.Node) and node.args[0].target is aten.unbind.int:
        unbind, index = node.args
        source, dim = unbind.args[0], operators.argument(unbind, "dim")
    else:
        return None
    shape = tools.shape(source)
    dim = dim % len(shape)
    if isinstance(index, int) and index < 0 and isinstance(shape[dim], int):
        index += shape[dim]
    return (source, dim, index) if isinstance(index, int) and index >= 0 else None

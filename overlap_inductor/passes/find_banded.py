# SPDX-License-Identifier: Apache-2.0
"""Find ``matmul -> row-wise ops -> all-to-all``: the projections of Ulysses attention, followed by a norm of q and k or
by a rotary embedding (``sites.banded_nodes``).

The finder walks back from the all-to-all to its one matmul, and then forward with ``sites.row_wise``. R: number of
ranks::

    q = mm(x, w)                                         # [tokens] [R heads width]
    y = norm(q) * cos + turned(norm(q)) * sin            # any ops that compute each token by itself
    out = wait_tensor(all_to_all_single(permute(y)))     # [R] [tokens] [heads width]
    ->  for each band of tokens: mm, norm, rotary embedding; send the band's part of each rank's slice
        q, y as joined bands                             # if a later node reads them
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites import row_pieces
from overlap_inductor.sites import row_wise
from overlap_inductor.sites.all_to_all import changes_shards
from overlap_inductor.sites.all_to_all import is_uneven
from overlap_inductor.sites.banded_nodes import BandedNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode

MOST_NODES = 200
"""The search from an all-to-all back to its matmul stops when it has found this many nodes."""


def find_banded(collective: CollectiveNode, owned: Collection[fx.Node]) -> BandedNodes | None:
    """The site at an all-to-all, or ``None``. ``owned``: matmuls of other sites."""
    if changes_shards(collective.node) or is_uneven(collective):
        return None
    behind = _behind(collective.input)
    size = tools.numel(tools.shape(collective.input))
    found = [m for m in map(matmuls.parse, behind) if m is not None and same_size(_numel(m.node), size)]
    if len(found) != 1 or found[0].node in owned or found[0].batched or found[0].refusal() is not None:
        return None
    (leaf,) = found
    known: dict[fx.Node, bool] = {}
    region = sorted(n for n in behind if n is not leaf.node and tools.depends_on(n, leaf.node, known))
    members = {leaf.node, *region}
    kept = [n for n in sorted(members) if any(u not in members and u is not collective.node for u in n.users)]
    if any(u not in members and u < collective.node or not tools.is_tensor(n) for n in kept for u in n.users):
        return None
    try:
        return _site(collective, leaf, region, kept)
    except LayoutError:
        return None


def _behind(root: fx.Node) -> set[fx.Node]:
    """``root`` and the nodes from which it is computed, back to matmuls and to ops that are neither views nor
    row-wise."""
    pending, seen = [root], {root}
    while pending and len(seen) < MOST_NODES:
        node = pending.pop()
        if (
            node.op != "call_function"
            or matmuls.parse(node) is not None
            or not (_is_view(node) or row_wise.may_be(node))
        ):
            continue
        following = [n for n in node.all_input_nodes if n not in seen and "val" in n.meta]
        seen.update(following)
        pending += following
    return seen


def _numel(node: fx.Node) -> object:
    return tools.numel(tools.shape(node))


def _is_view(node: fx.Node) -> bool:
    return tools.is_reshape(node) or tools.permutation(node) is not None or node.target in tools.SAME


def _site(
    collective: CollectiveNode, leaf: matmuls.MatmulNode, region: list[fx.Node], kept: list[fx.Node]
) -> BandedNodes:
    rows, columns = (Atom(size) for size in tools.shape(leaf.node))
    layouts: dict[fx.Node, Layout] = {leaf.node: Layout(((Atom(1, rank=True), rows), (columns,)))}
    through: dict[fx.Node, fx.Node] = {}
    whole: list[Atom] = []
    for node in region:
        if _is_view(node):
            through[node] = node.args[0]
            layouts[node] = _viewed(node, layouts[through[node]])
        elif row_wise.may_be(node):
            result = row_wise.result(node, layouts)
            layouts[node] = result.layout
            whole += result.whole
        else:
            raise LayoutError(f"{node.name} ({node.target}) is not row-wise")
    receivers, slice_ = _slices(collective, layouts)
    leaves = [a for a in rows.leaves() if not same_size(a.size, 1)]
    if not leaves or leaves[0] not in slice_ or receivers in rows.leaves():
        raise LayoutError(
            "the dim that is divided among the receiving ranks belongs to the matmul's rows, or a slice does not hold"
            " these rows"
        )
    band = leaves[0]
    if any(part is band for atom in whole for part in atom.leaves()):
        raise LayoutError("an op needs all rows of the matmul")
    externals = _externals(layouts, through, band)
    if any(row_pieces.place_of(layouts[n], band) is None for n in kept):
        raise LayoutError("the pieces of a result that is also read elsewhere cannot be joined")
    width, ranks = tools.shape(leaf.node)[1], collective.world_size
    return BandedNodes(
        [collective],
        collective.wait,
        [leaf],
        layouts,
        through,
        externals,
        ShardedDim(1, 1, width // ranks, width, (), ()),
        "N",
        received=Layout(((Atom(ranks, rank=True),), tuple(slice_))),
        receivers=receivers,
        band=band,
        kept=kept,
        slice=slice_,
    )


def _viewed(node: fx.Node, layout: Layout) -> Layout:
    order = tools.permutation(node)
    if order is not None:
        return layout.permute(order)
    return layout.reshape(tools.shape(node)) if tools.is_reshape(node) else layout


def _slices(collective: CollectiveNode, layouts: dict[fx.Node, Layout]) -> tuple[Atom, list[Atom]]:
    """``(atom of the receiving ranks, atoms of a slice in order)``. An atom is a dim, or a factor of a dim
    (``layouts.Atom``). The first atom has one index for each receiving rank. Raises ``LayoutError`` if no single atom
    has. If the all-to-all's input is a
    flattened view of a tensor ``[R, ...]``, the atoms are read from that tensor. (A reshape cannot split a flattened
    dim of symbolic size.)"""
    source, ranks = collective.input, collective.world_size
    while _is_view(source) and tools.permutation(source) is None and tools.shape(source)[:1] != [ranks]:
        source = source.args[0]
    if tools.shape(source)[:1] == [ranks] and source in layouts:
        layout = layouts[source]
    else:
        size = _numel(collective.input)
        layout = layouts[collective.input].reshape([ranks, size // ranks])  # type: ignore[operator]
    first, *others = layout.refined().dims
    receivers = Layout((first,)).without_rank().flat()
    if len(receivers) != 1:
        raise LayoutError("no single dim of the matmul's result has one index for each receiving rank")
    return receivers[0], Layout(tuple(others)).without_rank().flat()


def _externals(layouts: dict[fx.Node, Layout], through: dict[fx.Node, fx.Node], band: Atom) -> list[fx.Node]:
    """The tensors that the row-wise ops between matmul and all-to-all read, except results of the matmul or of these
    ops. Raises ``LayoutError`` if a tensor has the dim that is cut into bands, but cannot be cut there."""
    found: dict[fx.Node, None] = {}
    for user in layouts:
        if user in through or matmuls.parse(user) is not None:
            continue
        for node in tools.tensor_inputs(user):
            if node in layouts:
                continue
            found[node] = None
            for at in row_pieces.aligned(node, user).values():
                atoms = layouts[user].refined().dims[at]
                if any(a is band for a in atoms) and row_pieces.position(atoms, band) is None:
                    raise LayoutError(f"{node.name} cannot be cut as the matmul's rows are")
    return list(found)

# SPDX-License-Identifier: Apache-2.0
"""Find ``lookups -> all-to-all`` and ``all-to-all -> gradients of tables``, as DLRM writes them. Each rank holds tables
of its own, and needs all tables' results for its slice of the batch::

    x = cat([embedding_bag(w0, i0, o0)[0], embedding_bag(w1, i1, o1)[0]], 1)      # [batch, tables * width]
    y = wait_tensor(all_to_all_single(x))                                         # forward

    g = wait_tensor(all_to_all_single(dy))                                        # backward
    dw0, dw1 = embedding_bag_backward(g[:, :width], ...), embedding_bag_backward(g[:, width:], ...)

The results of a rank's tables must have one shape and dtype. Other nodes may stand in between:

- between ``cat`` and collective: views and permuted copies;
- between a lookup and ``cat``: also pointwise ops, sums and means.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.find_received import behind_views
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import lookups
from overlap_inductor.sites.all_to_all import layouts_of
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.lookup_nodes import GradientNodes
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.lookups import LookupNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.torch_compat import operators

aten = tools.aten
STEPS = 12
"""The search from a part of the ``cat`` back to its lookup ends when it has met more nodes than this."""
FEW = 16
"""The most tables that are looked up rank by rank: one rank's slice of the batch at a time. Each table adds nodes for
every rank."""
_POOLS = (aten.sum.dim_IntList, aten.mean.dim)


def lookups_before(collective: CollectiveNode) -> list[tuple[fx.Node, LookupNode]]:
    """``(part, its lookup)`` for each part of the collective's input, in order. Empty if a part has no lookup."""
    node: fx.Node = collective.input
    while _views(node):
        node = node.args[0]
    parts: list[fx.Node] = list(node.args[0]) if node.target is aten.cat.default else [node]
    found = [(part, _lookup_of(part)) for part in parts]
    return [(part, lookup) for part, lookup in found if lookup is not None] if all(m for _, m in found) else []


def gradients_after(collective: CollectiveNode) -> list[LookupNode]:
    """The tables' gradients that are computed from the collective's result."""
    found: list[LookupNode] = []

    def goes_on(node: fx.Node) -> bool:
        gradient = lookups.parse_gradient(node)
        if gradient is not None and node not in (m.node for m in found):
            found.append(gradient)
        through = _views(node) or _selects(node) or tools.is_pointwise(node) or node.target is aten.expand.default
        return gradient is None and through

    tools.walk([collective.wait], goes_on)
    return found


def find_pooled(collective: CollectiveNode) -> PooledNodes | Reason:
    """The site at a collective for which ``lookups_before`` finds lookups, or why there is no site."""
    found = lookups_before(collective)
    parts = [part for part, _ in found]
    try:
        sent, received = layouts_of(collective)
        joined, layout = behind_views(collective.input, sent)
        between = _between(collective.input, joined)
        if (obstacle := _not_sent_as_made(parts, joined, collective)) is not None:
            return obstacle
        if joined.target is aten.cat.default:
            between.insert(0, joined)
            dim = operators.argument(joined, "dim") % len(tools.shape(joined))
            if not all(tools.same_shape(part, parts[0]) for part in parts):
                return Reason("layout", f"{joined.name} joins results of different shapes; expected one shape")
            tables, block = _split(layout, dim, len(parts), tools.shape(joined))
        else:
            tables, block = Layout(((Atom(1),),)), layout
        block = _led_by_rank(block)
    except LayoutError as error:
        return Reason("layout", str(error))
    inside = {*between, collective.node}
    by_rank = len(parts) <= FEW and all(
        lookup.kind == "embedding"
        and not _computed(part, lookup)
        and _readers(part, lookup) <= inside
        and statically_known_true(tools.numel(tools.shape(lookup.lhs)) % collective.world_size == 0)
        for part, lookup in found
    )
    # Which indices belong to a slice of a batch of bags is known only at run time, from the offsets. So bags are not
    # looked up rank by rank. If the only table is not looked up rank by rank, no other lookup can hide the table's
    # exchange, so the site is refused.
    if len(parts) == 1 and not by_rank:
        return _one_table(collective, ", or one table of plain rows that can be looked up rank by rank")
    return PooledNodes(
        collective, [lookup for _, lookup in found], block, tables, parts, between, sent, received, by_rank=by_rank
    )


def _not_sent_as_made(parts: list[fx.Node], joined: fx.Node, collective: CollectiveNode) -> Reason | None:
    """Why the parts of ``joined`` cannot be sent as looked up, or ``None``. The collective's input is a view of
    ``joined``."""
    if parts != (list(joined.args[0]) if joined.target is aten.cat.default else [joined]):
        text = f"{joined.name} is a view of the tables' results in which the ranks' slices cannot be told apart"
        return Reason("layout", f"{text}; expected slices of whole rows")
    dtypes = [tools.dtype(n) for n in (*parts, collective.input)]
    if len(set(dtypes)) > 1:
        names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
        return Reason("layout", f"{joined.name} joins tables of the dtypes {', '.join(names)}; expected one dtype")
    return None


def find_gradients(collective: CollectiveNode) -> GradientNodes | Reason:
    """The site at a collective for which ``gradients_after`` finds gradients, or why there is no site."""
    gradients = gradients_after(collective)
    try:
        sent, given = layouts_of(collective)
        source, source_layout = behind_views(collective.input, sent)
        base, layout = collective.wait, given
        while len(base.users) == 1 and _views(user := next(iter(base.users))):
            base, layout = user, _through(user, layout)
        found = _slices(base)
        if found is None:
            return _one_table(collective) if len(base.users) == 1 else _no_slices(base)
        dim, width, starts = found
        shape = tools.shape(base)
        count = shape[dim] // width
        tables, read = _split(layout, dim, count, shape)
        if any(n.target is aten.select.int for n in starts):
            read = Layout(tuple(atoms for d, atoms in enumerate(read.dims) if d != dim))
        block = _led_by_rank(read, moves=True)
    except LayoutError as error:
        return Reason("layout", str(error))
    if count < 2:
        return _one_table(collective)
    slices = {node: start // width for node, start in starts.items()}
    first = sorted(slices, key=lambda node: min(node.users, default=node))
    last_first = slices[first[0]] > slices[first[-1]]
    return GradientNodes(collective, gradients, block, tables, slices, read, source, source_layout, sent, last_first)


def _one_table(collective: CollectiveNode, also: str = "") -> Reason:
    return Reason(
        "one_table",
        f"{collective.node.name} exchanges the results of one table, so no table is left to hide the exchange behind;"
        f" expected at least 2 tables on each rank{also}",
    )


def _no_slices(base: fx.Node) -> Reason:
    text = f"{base.name} is not read in equal slices; expected one slice for each table, all of the same size"
    return Reason("layout", text)


def _views(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        tools.permutation(node) is not None or tools.is_reshape(node) or node.target in tools.SAME
    )


def _selects(node: fx.Node) -> bool:
    return node.target in (aten.slice.Tensor, aten.select.int, getitem, *tools.SPLITS)


def _lookup_of(part: fx.Node) -> LookupNode | None:
    """The lookup from which ``part`` is computed, or ``None``."""
    pending, seen = [part], {part}
    while pending and len(seen) <= STEPS:
        node = pending.pop(0)
        source = node.args[0] if node.target is getitem and node.args[1] == 0 else node
        found = lookups.parse(source)
        if found is not None:
            return found
        if node.op == "call_function" and (_views(node) or node.target in _POOLS or tools.is_pointwise(node)):
            pending += [n for n in tools.tensor_inputs(node) if n not in seen]
            seen.update(pending)
    return None


def _computed(part: fx.Node, lookup: LookupNode) -> bool:
    """Whether ``part`` is more than a view of the lookup's result."""
    return lookups.behind_reshapes(part) is not lookup.node


def _readers(part: fx.Node, lookup: LookupNode) -> set[fx.Node]:
    """The nodes that read the lookup's result, ``part`` or a view between the two. The views and ``part`` itself are
    left out."""
    views = {part}
    while part is not lookup.node:
        part = part.args[0]
        views.add(part)
    return {user for node in views for user in node.users} - views


def _between(node: fx.Node, base: fx.Node) -> list[fx.Node]:
    """In graph order, the views from ``base`` to ``node``, without ``base``."""
    found = []
    while node is not base:
        found.append(node)
        node = node.args[0]
    return found[::-1]


def _through(view: fx.Node, layout: Layout) -> Layout:
    order = tools.permutation(view)
    if order is not None:
        return layout.permute(order)
    return layout.reshape(tools.shape(view)) if tools.is_reshape(view) else layout


def _split(layout: Layout, dim: int, count: int, shape: list[Size]) -> tuple[Layout, Layout]:
    """``(layout of the tables, layout of one table)`` of a tensor that holds ``count`` tables along ``dim``. Raises
    ``LayoutError`` if the tables cannot be made a dim of ``layout``, or if this dim is cut between the ranks."""
    whole = layout.reshape([*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]])
    if any(atom.rank for atom in whole.dims[dim]):
        raise LayoutError("the results of the tables are cut between ranks before they are joined")
    return Layout((whole.dims[dim],)), Layout(tuple(atoms for d, atoms in enumerate(whole.dims) if d != dim))


def _led_by_rank(layout: Layout, moves: bool = False) -> Layout:
    """``layout`` with each atom in a dim of its own, the rank atom in front. An atom is a dim, or a factor of a dim
    (``layouts.Atom``). The rank atom counts the ranks.

    Raises:
        LayoutError: the rank atom is not first in ``layout`` and ``moves`` is false, or the batch is not known to be a
            multiple of the number of ranks.
    """
    atoms = layout.flat()
    rank = next(atom for atom in atoms if atom.rank)
    if atoms[0] is not rank and not moves:
        raise LayoutError("a rank's slice of a table's result is not one run of consecutive rows")
    if rank.total is not None:
        raise LayoutError("the batch is not known to be a multiple of the number of ranks")
    return Layout(((rank,), *((atom,) for atom in atoms if atom is not rank)))


def _slices(base: fx.Node) -> tuple[int, Size, dict[fx.Node, Size]] | None:
    """``(dim, size of a slice along dim, {slice: its start along dim})`` if each reader of ``base`` is a slice of one
    table; else ``None``."""
    found = list(_selected(base))
    if not found or any(dim != found[0][1] or not same_size(length, found[0][3]) for _, dim, _, length in found):
        return None
    dim, length = found[0][1], found[0][3]
    starts = {node: start for node, _, start, _ in found}
    known = all(isinstance(size, int) for size in (*starts.values(), length, tools.shape(base)[dim]))
    if not known or not length or any(size % length for size in (*starts.values(), tools.shape(base)[dim])):
        return None
    return dim, length, starts


def _selected(base: fx.Node) -> Iterator[tuple[fx.Node, int, Size, Size]]:
    """``(slice, dim, start, length)`` for each reader of ``base``. Each part of a split of ``base`` counts as a reader.
    The dim is -1 for a reader that is no slice, and for a slice with steps."""
    for user in base.users:
        if user.target is aten.select.int:
            dim, index = (int(operators.argument(user, name)) for name in ("dim", "index"))
            dim %= len(tools.shape(base))
            yield user, dim, index % tools.shape(base)[dim], 1
        elif user.target in tools.SPLITS:
            for element in user.users:
                yield from _pieces(element)
        else:
            yield from _pieces(user)


def _pieces(node: fx.Node) -> Iterator[tuple[fx.Node, int, Size, Size]]:
    piece = piece_of(node)
    if piece is None or piece.step != 1:
        yield node, -1, 0, 0
    else:
        yield node, piece.dim % len(tools.shape(piece.base)), piece.start, piece.length

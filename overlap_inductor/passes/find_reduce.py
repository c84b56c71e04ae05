# SPDX-License-Identifier: Apache-2.0
"""Find ``matmul -> collective`` (reduce-scatter, all-reduce, all-to-all, all-gather of an output).

The finder walks backward from the collective's input to matmuls, the *leaves*. The leaves, and the views and pointwise
ops after them, are the *region*. Before and after the rewrite::

    a = mm(x, w); b = mm(y, v)                      # leaves
    t = add(a, b)
    out = wait_tensor(reduce_scatter(t))
    ->  for each piece of t: mm of the same rows of x, and of y; add; start the piece's transfer
        out from the pieces that arrived

At an op that cannot be cut, such as a softmax, the walk ends too. The region reads the op's result as a plain tensor.
The finder finds no site if a plain tensor

- is computed from a leaf, or
- has another layout than the leaves, and is neither a scalar nor one value for each column.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.all_to_all import is_uneven
from overlap_inductor.sites.all_to_all import layouts_of
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.padded_output import nodes_between
from overlap_inductor.sites.padded_output import padded_output
from overlap_inductor.sites.padded_output import padding_before
from overlap_inductor.sites.pieces import appended_to
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.uneven_nodes import UnevenSentNodes
from overlap_inductor.torch_compat import operators

aten = tools.aten


def _scatter_source(cat: fx.Node, world_size: int) -> tuple[fx.Node, int] | Reason | None:
    """``(x, d)`` if ``cat`` is ``cat(split(x, dim=d), 0)`` with equal pieces, one for each rank in order. A ``Reason``
    if it joins one piece for each rank along dim 0 in another way. ``None`` for any other ``cat``."""
    source: Any = None
    dim: Any = None
    pieces: list[Any] = list(cat.args[0])
    if operators.argument(cat, "dim") != 0 or len(pieces) != world_size:
        return None
    for i, piece in enumerate(map(piece_of, pieces)):
        if piece is None:
            return None
        size, shard = tools.shape(piece.base)[piece.dim], piece.length
        if piece.step != 1:
            return Reason(
                "not_plain_scatter",
                f"piece {i} takes rows of dim {piece.dim} in steps of {piece.step}; expected consecutive rows",
            )
        # ``cat`` on dim 0 requires equal sizes in all other dims. So pieces that are cut along another dim have
        # one length. If the size of that dim is symbolic, this function does not check that the pieces cover the dim.
        equal = piece.dim != 0 if isinstance(size, torch.SymInt) else shard * world_size == size
        same = source is None or (piece.base is source and piece.dim == dim)
        if not same or not (equal or same_size(shard * world_size, size)):
            return Reason(
                "not_plain_scatter",
                f"piece {i} holds {shard} of {size} rows on dim {piece.dim}; expected equal pieces of one tensor"
                " that together hold all its rows",
            )
        if not same_size(piece.start, i * shard):
            return Reason(
                "not_plain_scatter",
                f"piece {i} begins at index {piece.start}; expected {i * shard}, in the ranks' order",
            )
        source, dim = piece.base, piece.dim
    return source, dim


def is_matmul_result(node: fx.Node) -> bool:
    """Whether ``node`` is computed from matmuls by sums, views and casts only."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if matmuls.parse(node) is not None:
            continue
        sources = _summands(node)
        if tools.is_reshape(node) or tools.permutation(node) is not None or tools.is_cast(node):
            sources = [node.args[0]]
        if not sources:
            return False
        pending += [s for s in sources if s not in seen]
        seen.update(sources)
    return True


def _summands(node: fx.Node) -> list[fx.Node]:
    """The tensors that ``node`` adds without a factor; ``[]`` if it does anything else."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(map(tools.is_tensor, node.args)):
        return []
    return list(node.args)


class Tracer:
    """Walks backward from the collective's input and gives every node its layout.

    Attributes:
        unfolds: whether to follow a bias that is a sum of matmuls (``matmuls.folded``).
        owned: matmuls of other sites. A bias that holds one of them is not followed.
        read: matmuls that are read as plain tensors.
        left: the ``owned`` matmuls found in biases.
        through: the source of each view-like node.
        externals: the plain tensors.
        obstacle: why a ``cat`` is not a plain scatter, or ``None``.
        unfolded: biases that were followed.
        padding: the node that appends zeros before a gather, or ``None``.
        received: the layout of an all-to-all's result.
    """

    def __init__(self, world_size: int, unfolds: bool, owned: Collection[fx.Node], read: Collection[fx.Node]) -> None:
        self.world_size, self.unfolds, self.owned, self.read = world_size, unfolds, owned, read
        self.left: list[fx.Node] = []
        self.layouts: dict[fx.Node, Layout] = {}
        self.through: dict[fx.Node, fx.Node] = {}
        self.leaves: list[matmuls.MatmulNode] = []
        self.externals: list[fx.Node] = []
        self.obstacle: Reason | None = None
        self.region: set[fx.Node] = set()
        self.unfolded: set[fx.Node] = set()
        self.root: fx.Node
        """The first collective's input, or the tensor that ``padding`` pads."""
        self.padding: fx.Node | None = None
        self.received = Layout(())

    def trace(self, root: fx.Node, layout: Layout) -> None:
        """Walk from ``root`` to the matmuls. Raises ``LayoutError`` if a layout cannot be followed through an op, or
        if a node is read in two layouts."""
        pending = [(root, layout)]
        while pending:
            node, layout = pending.pop()
            known = self.layouts.get(node)
            if known is not None:
                if not known.same_elements(layout):
                    raise LayoutError(f"{node.name} is read in two different layouts; expected one")
                continue
            self.layouts[node] = layout
            matmul = self.leaf(node) if node not in self.read else None
            if matmul is not None:
                self.leaves.append(matmul)
                self.region.update((node, *matmul.inner))
                others = matmuls.folded(matmul) if self.unfolds else []
                theirs = [n for n in others if n in self.owned]
                self.left += theirs
                if others and not theirs and matmul.bias is not None:
                    self.unfolded.add(matmul.bias)
                    pending.append((matmul.bias, layout))
                continue
            self.region.add(node)
            if node.op != "call_function":
                self._external(node)
            elif (appended := appended_to(node)) is not None and is_matmul_result(appended[0]):
                source, dim = appended
                self._through(node, source, layout.cut_short(dim, tools.shape(source)[dim]), pending)
            elif node.target is aten.cat.default and isinstance(found := _scatter_source(node, self.world_size), tuple):
                source, dim = found
                rank_first = layout.refined().dims[0]
                if not rank_first or not rank_first[0].rank:
                    raise LayoutError(f"{node.name} joins slices that are not the ranks' parts of the scatter")
                self._through(
                    node, source, layout.move_rank(0, dim, tools.shape(source)[dim]) if dim else layout, pending
                )
            elif node.target is aten.cat.default and isinstance(found, Reason):
                self.obstacle = found
            elif tools.is_reshape(node):
                self._through(node, node.args[0], layout.reshape(tools.shape(node.args[0])), pending)
            elif (order := tools.permutation(node)) is not None:
                inverse = sorted(range(len(order)), key=order.__getitem__)
                self._through(node, node.args[0], layout.permute(inverse), pending)
            elif tools.is_pointwise(node):
                self.visit_pointwise(node, layout, pending)
            else:
                self.visit_other(node, layout, pending)

    def leaf(self, node: fx.Node) -> matmuls.MatmulNode | None:
        """``node`` as a matmul at which the walk ends, or ``None``."""
        return matmuls.parse(node)

    def visit_pointwise(self, node: fx.Node, layout: Layout, pending: list[tuple[fx.Node, Layout]]) -> None:
        for source in tools.tensor_inputs(node):
            if tools.same_shape(source, node):
                pending.append((source, layout))
            else:
                self.layouts[source] = Layout.of_shape(tools.shape(source))
                self._external(source)

    def visit_other(self, node: fx.Node, layout: Layout, pending: list[tuple[fx.Node, Layout]]) -> None:
        self._external(node)

    def _through(self, node: fx.Node, source: Any, layout: Layout, pending: list[tuple[fx.Node, Layout]]) -> None:
        self.through[node] = source
        pending.append((source, layout))

    def _external(self, node: fx.Node) -> None:
        self.region.discard(node)
        if node not in self.externals:
            self.externals.append(node)


def traced(
    collectives: list[CollectiveNode],
    owned: Collection[fx.Node],
    read: Collection[fx.Node],
    tracer_type: type[Tracer] = Tracer,
) -> Tracer:
    """A tracer that has walked backward from all inputs of ``collectives``. Raises ``LayoutError`` as ``trace``
    does."""
    first = collectives[0]
    tracer = tracer_type(first.world_size, first.kind != "all_gather", owned, read)
    tracer.padding = padding_before(first.input) if first.kind == "all_gather" else None
    tracer.root = first.input if tracer.padding is None else tracer.padding.args[0]
    shape = tools.shape(tracer.root)
    layout = Layout.of_shape(shape)
    if first.kind == "reduce_scatter":
        layout = Layout.scattered(shape, first.world_size)
    elif first.kind == "all_to_all":
        layout, tracer.received = layouts_of(first)
    for root in (tracer.root, *(c.input for c in collectives[1:])):
        tracer.trace(root, layout)
    return tracer


def find_reduce(
    collectives: list[CollectiveNode], result: fx.Node, owned: Collection[fx.Node] = ()
) -> tuple[ReduceNodes | None, Reason | None, list[fx.Node]]:
    """The site at a collective, or at several all-reduces that are added up to ``result``: ``(nodes, obstacle, left)``.

    Args:
        result: the collective's wait, or the sum of the waits.
        owned: matmuls of other sites.

    Returns:
        nodes: the site's nodes, or ``None`` if there is no site.
        obstacle: why the site must stay as written, or why there is no site. ``None`` if it may be rewritten, or if the
            walk reached no matmul.
        left: the matmuls in ``owned`` that stay with their own sites.
    """
    left: list[fx.Node] = []
    try:
        tracer = traced(collectives, owned, ())
        if any(m.node in owned for m in tracer.leaves) and any(m.node not in owned for m in tracer.leaves):
            left = [m.node for m in tracer.leaves if m.node in owned]
            tracer = traced(collectives, owned, owned)
        left += tracer.left
        if left and not tracer.leaves:
            names = ", ".join(n.name for n in left)
            text = f"the collective's input is the result of matmuls that belong to another site: {names}"
            return None, Reason("shares_nodes", text), left
        nodes, obstacle = _site(collectives, result, tracer)
    except LayoutError as error:
        return None, Reason("layout", str(error)), left
    return nodes, obstacle, left


def _site(
    collectives: list[CollectiveNode], result: fx.Node, tracer: Tracer
) -> tuple[ReduceNodes | None, Reason | None]:
    first = collectives[0]
    world_size = first.world_size
    if tracer.obstacle is not None:
        return None, tracer.obstacle
    if not tracer.leaves:
        return None, None
    refusal = next((r for r in (m.refusal() for m in tracer.leaves) if r), None)
    if refusal is not None:
        return None, Reason("matmul_form", refusal)
    leaf = tracer.leaves[0]
    layout = tracer.layouts[leaf.node].refined()
    for other in tracer.leaves[1:]:
        theirs = tracer.layouts[other.node].refined()
        # ``same_elements`` ignores dims of size 1. Pieces are added, so these dims must agree too.
        alike = len(theirs.dims) == len(layout.dims) and all(
            map(same_size, tools.shape(other.node), tools.shape(leaf.node))
        )
        if (
            not alike
            or [len(d) for d in theirs.dims] != [len(d) for d in layout.dims]
            or not theirs.same_elements(layout)
        ):
            return None, Reason(
                "layout",
                f"{other.node.name} and {leaf.node.name} are added in different layouts; expected the same layout",
            )
    if (reason := reads_a_result(tracer)) is not None:
        return None, reason
    sharded = _cut(first.kind, leaf, layout, tracer.layouts[tracer.root], world_size)
    _check_externals(tracer, layout)
    padding = None
    if tracer.padding is not None:
        padding, sharded = padded_output(tracer.padding, leaf, layout, sharded)
    role = leaf.output_role(sharded.dim)
    if sharded.short and (reason := _not_zero(tracer, sharded, role)) is not None:
        return None, reason
    found = (collectives, result, tracer.leaves, tracer.layouts, tracer.through, tracer.externals, sharded, role)
    if first.kind == "all_to_all" and is_uneven(first):
        if (reason := _not_in_rows(tracer, sharded, layout)) is not None:
            return None, reason
        nodes: ReduceNodes = UnevenSentNodes(*found, tracer.unfolded)
    elif first.kind == "all_to_all":
        nodes = SentNodes(*found, tracer.unfolded, received=tracer.received)
    else:
        nodes = ReduceNodes(*found, tracer.unfolded, padding=padding)
    return nodes, used_elsewhere(collectives, tracer)


def reads_a_result(tracer: Tracer) -> Reason | None:
    """The obstacle if a plain tensor, or an operand of a leaf, is computed from a leaf; else ``None``. Such a tensor
    needs the whole result of the leaf from which it is computed."""
    read = [(n, [n]) for n in tracer.externals if n not in tracer.region]
    for matmul in tracer.leaves:
        bias = [matmul.bias] if matmul.bias is not None and matmul.bias not in tracer.unfolded else []
        read.append((matmul.node, [matmul.lhs, matmul.rhs, *bias]))
    for leaf in tracer.leaves:
        known: dict[fx.Node, bool] = {}
        for node, operands in read:
            if any(tools.depends_on(n, leaf.node, known) for n in operands):
                where = f"{node.name} ({node.target}) is between {leaf.node.name} and the collective"
                return Reason("op_between", f"{where} and cannot be computed in pieces")
    return None


def used_elsewhere(collectives: list[CollectiveNode], tracer: Tracer) -> Reason | None:
    """The obstacle if a node outside the region reads a node of the region, or ``None``."""
    ends = {c.node for c in collectives} | nodes_between(collectives[0].input, tracer.root)
    inside = tracer.region | ends | set(tracer.through)
    outside = [(n, u) for n in tracer.region for u in n.users if u not in inside and not _is_piece(u, inside)]
    if not outside:
        return None
    node, user = outside[0]
    return Reason(
        "other_users", f"{node.name} is also used by {user.name}, which needs the whole result before the collective"
    )


def _not_in_rows(tracer: Tracer, sharded: ShardedDim, layout: Layout) -> Reason | None:
    """Why a site with an uneven all-to-all must stay as written, or ``None``. Each row that is sent must come from the
    same row of each matmul, and only views, casts and sums may stand between."""
    leaf = tracer.leaves[0].node
    one_row = sharded.dim == 0 and not sharded.before and not sharded.after
    if not one_row or not layout.same_elements(tracer.layouts[tracer.root]):
        text = f"the parts differ in size, and they are not whole rows of {leaf.name} in the same order"
        return Reason("uneven_splits", f"{text}; expected each row of the matmul to be a row that is sent")
    for node in tracer.region:
        if tools.is_pointwise(node) and not tools.is_cast(node) and node.target is not aten.add.Tensor:
            text = f"{node.name} ({node.target}) is between {leaf.name} and the all-to-all, whose parts differ in size"
            return Reason("uneven_splits", f"{text}; expected views, casts and sums of matmuls only")
    return None


def _not_zero(tracer: Tracer, sharded: ShardedDim, role: str) -> Reason | None:
    """Zeros are appended to the matmuls' result. Returns why the operands cannot be padded instead, or ``None``."""
    for matmul in tracer.leaves:
        biased = matmul.bias is not None and matmul.bias not in tracer.unfolded
        if matmul.kind == "scaled_mm" or biased:
            return Reason(
                "not_plain_scatter",
                f"zeros are appended to the result of {matmul.node.name} ({matmul.kind}); appending them to the"
                " operands instead would not give zeros",
            )
    if not same_size(sharded.size, tools.shape(tracer.leaves[0].node)[sharded.dim]):
        return Reason(
            "layout",
            f"zeros are appended to a part of a dim of {tracer.leaves[0].node.name}; expected them at the end of the"
            " whole dim",
        )
    for node in tracer.region:
        # A sum of the region's own nodes adds zeros to zeros.
        adds = _summands(node)
        if tools.is_pointwise(node) and not tools.is_cast(node) and not (adds and tracer.region.issuperset(adds)):
            return Reason(
                "not_plain_scatter",
                f"{node.name} ({node.target}) is between the matmul and the collective, and zeros are appended"
                " there; expected views, casts and sums of matmuls only",
            )
    return None


def _is_piece(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether ``node`` is a split, getitem, slice, copy or padding that only such nodes and nodes in ``inside``
    read."""
    cuts = (*tools.SPLITS, *tools.SAME, aten.slice.Tensor, aten.constant_pad_nd.default)
    if node.target in cuts or getattr(node.target, "__name__", "") == "getitem":
        return all(u in inside or _is_piece(u, inside) for u in node.users)
    return False


def _cut(kind: str, leaf: matmuls.MatmulNode, layout: Layout, gathered: Layout, world_size: int) -> ShardedDim:
    """The dim of the matmul's output that is cut. Raises ``LayoutError`` as ``ShardedDim.of`` does. Also raises it if
    an all-gather's input has another order of elements than the matmul's output."""
    if kind in ("reduce_scatter", "all_to_all"):
        return ShardedDim.of(layout)
    if kind == "all_gather" and not layout.same_elements(gathered):
        raise LayoutError(f"the elements of {leaf.node.name} are gathered in another order than they are computed in")
    dim = 0
    size = tools.shape(leaf.node)[dim]
    return ShardedDim(dim, 1, size // world_size, size, (), ())


def _check_externals(tracer: Tracer, layout: Layout) -> None:
    for node in tracer.externals:
        shape = tools.shape(node)
        if tools.is_scalar_like(node) or not shape:
            continue
        if not tracer.layouts[node].same_elements(layout) and any(
            not (isinstance(s, int) and s == 1) for s in shape[:-1]
        ):
            text = (
                f"{node.name} of shape {shape} is read between matmul and collective and cannot be cut like the matmul"
            )
            raise LayoutError(text)
        for user in node.users:
            if (
                user in tracer.region
                and not tracer.layouts[node].same_elements(layout)
                and not _same_columns(tracer.layouts[user], layout)
            ):
                raise LayoutError(
                    f"{node.name} of shape {shape} varies along a dim that is not the matmul's columns; expected one"
                    " value for each column"
                )


def _same_columns(layout: Layout, leaf: Layout) -> bool:
    """Whether the last dims of both layouts consist of the same atoms (factors of a dim: ``layouts.Atom``), apart from
    atoms of size 1."""

    def columns(one: Layout) -> list[int]:
        return [id(a) for a in one.refined().dims[-1] if a.rank or not (isinstance(a.size, int) and a.size == 1)]

    return columns(layout) == columns(leaf)

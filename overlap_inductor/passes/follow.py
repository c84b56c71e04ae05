# SPDX-License-Identifier: Apache-2.0
"""Follow a received tensor forward, from an all-gather or an all-to-all, to every matmul of which it is an operand.

The tensor may pass through views, joins of its shards, row-wise and pointwise ops (R ranks)::

    wait = wait_tensor(all_gather(x [s, h]))        # [R s, h]
    view = reshape(wait)
    y, z = mm(view, w), mm(view, v)                 # consumers: the matmuls
"""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites import row_wise
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.pieces import behind_copies
from overlap_inductor.sites.pieces import may_be_a_piece
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.torch_compat import operators

aten = tools.aten


def _pieces(cat: fx.Node) -> tuple[fx.Node, list[tuple[Any, Any]]] | None:
    """``(source, [(start, length) of each piece])`` if ``cat`` joins pieces of dim 0 of one tensor, else ``None``."""
    source: fx.Node | None = None
    spans: list[tuple[Any, Any]] = []
    for node in cat.args[0]:
        piece = piece_of(behind_copies(node))
        if piece is None or piece.dim != 0 or piece.step != 1 or (source or piece.base) is not piece.base:
            return None
        source = piece.base
        spans.append((piece.start, piece.length))
    return (source, spans) if source is not None else None


def plain_gather(cat: fx.Node, world_size: int) -> tuple[fx.Node, Any] | Reason | None:
    """``(gathered tensor, number of rows kept)`` if ``cat`` joins the ranks' shards of a gathered tensor in order.
    A ``cat`` along dim 0 may leave out rows at the end, the padding. ``None`` in place of the number: all rows are
    kept.

    Returns a ``Reason`` if ``cat`` joins pieces of one tensor in another way, and ``None`` for any other ``cat``.
    """
    found = _pieces(cat)
    if found is None:
        return None
    source, spans = found
    rows = tools.shape(source)[0]
    shard = rows // world_size
    target = operators.argument(cat, "dim") % len(tools.shape(cat))
    if len(spans) > world_size:
        return Reason(
            "not_plain_gather", f"a cat joins {len(spans)} pieces of {world_size} shards; expected each shard once"
        )
    short = False
    kept: Any = 0
    for i, (start, length) in enumerate(spans):
        full = same_size(length, shard)
        if (
            short
            or not same_size(start, i * shard)
            or not (full or (target == 0 and isinstance(length, int) and length < shard))
        ):
            return Reason(
                "not_plain_gather",
                f"piece {i} of a cat is rows {start} to {start + length} of the gathered tensor; expected rows"
                f" {i * shard} to {(i + 1) * shard}",
            )
        short = not full
        kept = kept + length
    if len(spans) < world_size and target != 0:
        return Reason("not_plain_gather", f"a cat joins only {len(spans)} of {world_size} shards; expected all of them")
    return source, None if same_size(kept, rows) else kept


class Follower:
    """Walks forward from one wait, whose result has layout ``raw``. ``layouts`` holds the layout of every *form* of the
    received tensor: a view of it, or a result computed from it row by row."""

    def __init__(self, collective: CollectiveNode, raw: Layout) -> None:
        self.collective, self.raw = collective, raw
        self.what = collective.kind.replace("_", "-")
        self.layouts: dict[fx.Node, Layout] = {collective.wait: raw}
        self.through: dict[fx.Node, fx.Node] = {}
        self.obstacles: list[Reason] = []
        self.known: dict[fx.Node, bool] = {}
        self.consumers: list[GatherConsumer] = []
        self.row_wise: dict[fx.Node, list[Atom]] = {}
        """For each row-wise node that is not element-wise, the atoms (``layouts.Atom``) that make up the dims which the
        node needs whole."""

    def run(self) -> None:
        tools.walk([self.collective.wait], self._goes_on)

    def _goes_on(self, node: fx.Node) -> bool:
        """Visit ``node``. Returns whether its users must be visited: ``node`` is a form, or may be a piece that a
        ``cat`` joins."""
        if node.op == "call_function" and (
            node.target is aten.cat.default or any(s in self.layouts for s in node.all_input_nodes)
        ):
            try:
                self._visit(node)
            except LayoutError as error:
                self.obstacles.append(Reason("layout", f"{node.name}: {error}"))
        return node in self.layouts or may_be_a_piece(node)

    def _pass_on(self, node: fx.Node, source: fx.Node, layout: Layout) -> None:
        self.layouts[node] = layout
        self.through[node] = source

    def _visit(self, node: fx.Node) -> None:
        matmul = matmuls.parse(node)
        if matmul is not None:
            self._consume(matmul)
            return
        if node.target is aten.cat.default:
            self._visit_cat(node)
            return
        source: fx.Node = next(s for s in node.all_input_nodes if s in self.layouts)
        layout = self.layouts[source]
        if tools.is_reshape(node):
            self._pass_on(node, source, layout.reshape(tools.shape(node)))
        elif (order := tools.permutation(node)) is not None:
            self._pass_on(node, source, layout.permute(order))
        elif node.target is aten.slice.Tensor:
            self._visit_slice(node, source)
        elif tools.is_pointwise(node) and self._is_element_wise(node, source):
            self._pass_on_computed(node, source, layout)
        else:
            self._visit_row_wise(node, source)

    def _visit_cat(self, node: fx.Node) -> None:
        found = plain_gather(node, self.collective.world_size)
        if isinstance(found, Reason):
            self.obstacles.append(found)
        elif found is not None and found[0] in self.layouts:
            source, kept = found
            target = operators.argument(node, "dim") % len(tools.shape(node))
            layout = self.layouts[source]
            if target != 0:
                layout = layout.move_rank(0, target)
            self._pass_on(node, source, layout if kept is None else layout.cut_short(0, kept))
        elif found is None and (gathered := [n for n in node.all_input_nodes if n in self.layouts]):
            self._visit_row_wise(node, gathered[0])

    def _visit_slice(self, node: fx.Node, source: fx.Node) -> None:
        dim, start = operators.argument(node, "dim"), operators.argument(node, "start") or 0
        layout, kept = self.layouts[source], tools.shape(node)[dim]
        if same_size(kept, tools.shape(source)[dim]):
            self._pass_on(node, source, layout)
        elif layout.rank_dim() != dim % len(tools.shape(source)):
            self._visit_row_wise(node, source)
        elif isinstance(kept, int) and kept < 2:
            return
        elif start == 0 and operators.argument(node, "step") == 1 and layout.leads_with_rank(dim):
            self._pass_on(node, source, layout.cut_short(dim, kept))

    def _is_element_wise(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether ``node`` keeps the layout of ``source``. Its tensor inputs must have this layout or be scalars."""
        layout = self.layouts[source]
        if not tools.same_shape(node, source):
            return False
        for other in tools.tensor_inputs(node):
            same = other in self.layouts and self.layouts[other].same_elements(layout)
            if not same and not tools.is_scalar_like(other):
                return False
        return not self._needy(node)

    def _needy(self, node: fx.Node) -> fx.Node | None:
        """An input of ``node`` that is computed from the received tensor and has no layout, or ``None``. Such an input
        needs the whole received tensor."""
        return next(
            (
                n
                for n in node.all_input_nodes
                if n not in self.layouts and tools.depends_on(n, self.collective.wait, self.known)
            ),
            None,
        )

    def _pass_on_computed(self, node: fx.Node, source: fx.Node, layout: Layout) -> None:
        self.layouts[node] = layout

    def _visit_row_wise(self, node: fx.Node, source: fx.Node) -> None:
        if not row_wise.may_be(node):
            if _is_operand(node):
                self.obstacles.append(
                    Reason(
                        "op_between",
                        f"{node.name} ({node.target}) is between the {self.what} and a matmul and cannot be computed in"
                        " pieces",
                    )
                )
            return
        needy = self._needy(node)
        if needy is not None:
            if _is_operand(node):
                text = (
                    f"{node.name} reads {needy.name} ({needy.target}), which needs the whole result of the {self.what}"
                )
                self.obstacles.append(Reason("weight_depends_on_collective", text))
            return
        try:
            found = row_wise.result(node, self.layouts)
            if found.rows_of and any(
                ShardedDim.of(self.layouts[n]).short for n in node.all_input_nodes if n in self.layouts
            ):
                raise LayoutError(
                    "it combines received rows with rows of another tensor after the padding of uneven shards was cut"
                    " off"
                )
        except LayoutError as error:
            if _is_operand(node):
                self.obstacles.append(
                    Reason(
                        "op_between",
                        f"{node.name} ({node.target}) is between the {self.what} and a matmul and cannot be computed in"
                        f" pieces: {error}",
                    )
                )
            return
        self.row_wise[node] = found.whole
        self._pass_on_computed(node, source, found.layout)

    def _consume(self, matmul: matmuls.MatmulNode) -> None:
        for operand, node, other in (("lhs", matmul.lhs, matmul.rhs), ("rhs", matmul.rhs, matmul.lhs)):
            if node not in self.layouts:
                continue
            if other in self.layouts or matmul.bias in self.layouts:
                self.obstacles.append(
                    Reason(
                        "weight_depends_on_collective",
                        f"{matmul.node.name} reads the result of the {self.what} as both operands, or as an"
                        " operand and the bias; expected as one operand only",
                    )
                )
                return
            refusal = matmul.refusal()
            if refusal is not None:
                self.obstacles.append(Reason("matmul_form", refusal))
                return
            layout = self.layouts[node]
            sharded = ShardedDim.of(layout)
            role = matmul.role(operand, sharded.dim)
            if role == "K" and matmul.kind == "scaled_mm":
                text = f"{matmul.node.name} contracts the sharded dim and has scales; expected a matmul without scales"
                self.obstacles.append(Reason("split_contraction", text))
                return
            self.consumers.append(GatherConsumer(matmul, operand, role, layout, sharded))
            return
        if any(scale in self.layouts for scale in matmul.scales()):
            self.obstacles.append(
                Reason(
                    "no_matmul",
                    f"the {self.what} moves a scale of {matmul.node.name} and no operand of it, so this matmul cannot"
                    f" hide the {self.what}",
                )
            )


def _is_operand(node: fx.Node) -> bool:
    """Whether a matmul reads ``node`` as an operand, not as a bias or scale."""
    return any(m is not None and node in (m.lhs, m.rhs) for m in map(matmuls.parse, node.users))


def consumers_of(follower: Follower) -> list[GatherConsumer]:
    """The matmuls that ``follower`` found and that can be cut. For any other matmul, adds an obstacle to
    ``follower.obstacles``. A matmul cannot be cut if

    - another of its inputs is also computed from the received tensor, or
    - its operand lacks the shards' padding, and a reshape split the shards (``Layout.refined``).
    """
    collective = follower.collective
    known: dict[fx.Node, bool] = {}
    consumers = []
    for consumer in follower.consumers:
        try:
            consumer.layout.refined()
        except LayoutError as error:
            follower.obstacles.append(Reason("layout", f"{consumer.operand_node.name}: {error}"))
            continue
        outside = zip(
            ("other operand", "bias", "scale", "scale"),
            (consumer.other_node, consumer.matmul.bias, *consumer.matmul.scales()),
            strict=True,
        )
        needy = next(
            (what for what, n in outside if n is not None and tools.depends_on(n, collective.wait, known)), None
        )
        if needy is not None:
            follower.obstacles.append(
                Reason(
                    "weight_depends_on_collective",
                    f"the {needy} of {consumer.matmul.node.name} is computed from the result of the"
                    f" {follower.what}; expected only one operand to depend on it",
                )
            )
        else:
            consumers.append(consumer)
    return consumers


def add_row_wise(nodes: GatherNodes, follower: Follower) -> None:
    """Set ``layouts`` and ``whole`` of ``nodes`` if a node before the matmuls is row-wise and not element-wise."""
    inside = nodes.between()
    if any(node in follower.row_wise for node in inside):
        wait = nodes.collective.wait
        nodes.layouts = {node: follower.layouts[node] for node in (wait, *sorted(inside)) if node in follower.layouts}
        nodes.whole = [atom for node, whole in follower.row_wise.items() if node in inside for atom in whole]

# SPDX-License-Identifier: Apache-2.0
"""``GatherNodes``: the nodes of ``all-gather -> matmul``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from operator import getitem

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.placement import Placement
from overlap_inductor.sites.placement import needed_behind


@dataclass(frozen=True)
class GatherConsumer:
    """A matmul with the gathered tensor as one operand.

    Attributes:
        operand: ``lhs`` or ``rhs``.
        role: role of the gathered dim: M, N, K or B.
        layout: the operand's layout, without padding that the graph cuts off.
        sharded: the operand's dim that holds the rank atom, which counts the ranks (``sites.layouts``).
    """

    matmul: MatmulNode
    operand: str
    role: str
    layout: Layout
    sharded: ShardedDim

    @property
    def operand_node(self) -> fx.Node:
        return self.matmul.lhs if self.operand == "lhs" else self.matmul.rhs

    @property
    def other_node(self) -> fx.Node:
        return self.matmul.rhs if self.operand == "lhs" else self.matmul.lhs


@dataclass(frozen=True)
class Epilogue:
    """Pointwise nodes that follow a gather's matmuls and are computed piece by piece.

    Attributes:
        nodes: these nodes and the views among them, in graph order.
        outputs: those of ``nodes`` and ``base`` that nodes outside the epilogue read.
        externals: the rows and scalars that ``nodes`` also read.
        base: the ``mm`` and ``addmm`` that ``nodes`` may read, all cut in the same way along M.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    externals: list[fx.Node] = field(default_factory=list)
    base: list[fx.Node] = field(default_factory=list)


@dataclass
class GatherNodes(SiteNodes):
    """all-gather -> views and pointwise ops -> matmuls -> epilogue.

    Attributes:
        raw: layout of the gathered tensor.
        through: source of each view-like node.
        layouts: layouts of the nodes from the gathered tensor to the matmuls. Empty if these nodes are only views and
            pointwise ops.
        whole: the dims that the row-wise ops in ``layouts`` need whole (``sites.row_wise``).
    """

    collective: CollectiveNode
    raw: Layout
    consumers: list[GatherConsumer]
    through: dict[fx.Node, fx.Node] = field(default_factory=dict)
    epilogue: Epilogue = field(default_factory=Epilogue)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    whole: list[Atom] = field(default_factory=list)

    @property
    def shard_shape(self) -> list[Size]:
        """The shape of one rank's shard, as the collective sends it."""
        return tools.shape(self.collective.input)

    @property
    def collectives(self) -> list[CollectiveNode]:
        return [self.collective]

    @property
    def matmuls(self) -> list[MatmulNode]:
        return [c.matmul for c in self.consumers]

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        return [c.sharded for c in self.consumers]

    @property
    def roles(self) -> list[str]:
        return [c.role for c in self.consumers]

    @property
    def tokens(self) -> Size:
        first = self.consumers[0]
        return tools.shape(first.operand_node)[first.sharded.dim]

    def matmul_sizes(self) -> list[MatmulSizes]:
        """``own`` names the dim N or M of the operand that is not gathered. This operand may be an uneven shard."""
        return [
            MatmulSizes(
                tools.shape(c.matmul.lhs)[:-2],
                *(tools.shape(c.matmul.lhs)[-2], tools.shape(c.matmul.rhs)[-1], tools.shape(c.matmul.lhs)[-1]),
                own="N" if c.operand == "lhs" else "M",
            )
            for c in self.consumers
        ]

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        matmuls = {c.matmul.node for c in self.consumers}
        pending = [self.collective.wait]
        while pending:
            for user in pending.pop().users:
                # Splits and their elements are followed: a ``cat`` of the elements may be the whole gathered tensor.
                if user in self.through or tools.copies(user) or user.target in (*tools.SPLITS, getitem):
                    pending.append(user)
                elif user not in matmuls:
                    return True
        return False

    def between(self) -> set[fx.Node]:
        """The matmuls' gathered operands, and the nodes after the wait from which these operands are computed."""
        known: dict[fx.Node, bool] = {}
        found: set[fx.Node] = set()
        pending = [c.operand_node for c in self.consumers]
        while pending:
            node = pending.pop()
            if node in found or node is self.collective.wait or not tools.depends_on(node, self.collective.wait, known):
                continue
            found.add(node)
            pending += node.all_input_nodes
        return found

    def behind_views(self, node: fx.Node) -> fx.Node:
        """Follow ``node`` back through views and copies. Returns the first node that is neither, at the latest the
        collective's wait."""
        while node is not self.collective.wait and (node in self.through or tools.copies(node)):
            node = self.through.get(node, node.args[0])
        return node

    def only_views(self, node: fx.Node) -> bool:
        """Whether views and copies alone make ``node`` from the gathered tensor."""
        return self.behind_views(node) is self.collective.wait

    def others(self) -> list[fx.Node]:
        place = self.place()
        return [*self.epilogue.nodes, *self.between(), *(place.hoisted if place is not None else ())]

    def places(self) -> list[Placement]:
        """Two places: at the gather, and at the first use of the site's results."""
        gather = self.collective.node
        members = {gather, self.collective.wait, *self.between(), *(c.matmul.node for c in self.consumers)}
        users = {user for member in members for user in member.users} - members
        first_use = min(users)
        operands = self._operands()
        return [
            Placement(gather, [], needed_behind(operands, gather), operands),
            Placement(
                first_use, sorted(n for n in members if n < first_use), needed_behind(operands, first_use), operands
            ),
        ]

    def _operands(self) -> list[fx.Node]:
        """What the steps read besides the gathered shards."""
        found = [n for c in self.consumers for n in (c.other_node, c.matmul.bias, *c.matmul.scales()) if n is not None]
        found += self.epilogue.externals
        # View-like nodes (``through``) are written again for the pieces. So the steps do not read the size arguments of
        # these nodes.
        inside = self.between()
        copied = [n for n in sorted(inside) if n not in self.through]
        read = [(i, n) for n in copied for i in n.all_input_nodes if i not in inside and i is not self.collective.wait]
        return found + [i for i, n in read if n in self.layouts or not tools.is_tensor(i) or tools.is_scalar_like(i)]

    def read_in_place(self) -> bool:
        inside = self.between()
        members = inside | {m.node for m in self.matmuls}
        return any(user not in members for node in inside for user in node.users)

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        # If the wait was not replaced, only the matmuls read the gathered tensor. So its views become unused.
        return set() if self.collective.wait in replaced else {*replaced, *self.through}

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Does nothing: the operands are read from the matmuls' arguments, which the rewrite itself replaces."""

    def cut(self) -> tuple[list[Size], str] | None:
        return None

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return None

    def computed_ahead(self) -> list[str]:
        computed = sorted(
            n for n in self.between() if n not in self.through and (tools.is_pointwise(n) or n in self.layouts)
        )
        places = {n: i for i, n in enumerate(computed)}

        def name(node: fx.Node) -> str:
            """A name for an input: ``v0``, ``v1``, ... for a computed node, ``x`` for the gathered tensor, else
            ``other``. A view has the name of its source."""
            while node in self.through:
                node = self.through[node]
            return f"v{places[node]}" if node in places else "x" if node is self.collective.wait else "other"

        return [
            f"{n.target}({', '.join(map(str, (fx.map_arg(n.args, name), fx.map_arg(n.kwargs, name))))})"
            for n in computed
        ]

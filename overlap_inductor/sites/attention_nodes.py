# SPDX-License-Identifier: Apache-2.0
"""``AttentionNodes``: all-gathers of keys and values -> attention. One gather may move both keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention import AttentionNode
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
class Cut:
    """A cut that keeps some consecutive indices of ``atom``, which is a dim or a factor of a dim (``layouts.Atom``).
    The first kept index is ``start``. The new atom ``left`` counts the kept indices."""

    atom: Atom
    start: int
    left: Atom


@dataclass(frozen=True)
class GatheredOperand:
    """The keys or the values.

    Attributes:
        raw: layout of the gathered tensor.
        cuts: in order, the cuts that take the operand from each rank's shard.
        layout: layout of the attention's operand: the atoms of ``raw``, each cut atom replaced by what is left of it.
    """

    collective: CollectiveNode
    raw: Layout
    cuts: tuple[Cut, ...]
    layout: Layout


@dataclass
class AttentionNodes(SiteNodes):
    """all-gathers -> views and cuts -> attention."""

    attention: AttentionNode
    key: GatheredOperand
    value: GatheredOperand

    @property
    def collectives(self) -> list[CollectiveNode]:
        both = {operand.collective.node: operand.collective for operand in (self.key, self.value)}
        return [both[node] for node in sorted(both)]

    @property
    def moved(self) -> list[CollectiveNode]:
        return self.collectives

    @property
    def matmuls(self) -> list[MatmulNode]:
        return [self.attention]

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        return [ShardedDim.of(self.key.layout)]

    @property
    def roles(self) -> list[str]:
        return ["K"]

    @property
    def tokens(self) -> Size:
        return self.attention.sizes[1]

    def matmul_sizes(self) -> list[MatmulSizes]:
        """One matmul that does as many multiplications as the two matmuls of attention. The scores need ``width``
        multiplications for each query and key, and the output needs ``columns``."""
        batch, queries, keys, width, columns = self.attention.sizes
        causal = self.attention.is_causal
        return [MatmulSizes(batch, queries, width + columns, keys, own="M", causal=causal)]

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        members = self._members()
        return any(user not in members for c in self.collectives for user in c.wait.users) or any(
            user not in members for node in self.between() for user in node.users
        )

    def between(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for operand, node in ((self.key, self.attention.rhs), (self.value, self.attention.value)):
            known: dict[fx.Node, bool] = {}
            pending = [node]
            while pending:
                node = pending.pop()
                wait = operand.collective.wait
                if node not in found and node is not wait and tools.depends_on(node, wait, known):
                    found.add(node)
                    pending += node.all_input_nodes
        return found

    def others(self) -> list[fx.Node]:
        place = self.place()
        return [*sorted(self.between()), *(place.hoisted if place is not None else ())]

    def places(self) -> list[Placement]:
        """The rewrite may write the site's steps before the last gather, or before the first use of the site's results.
        If the first use comes before the last gather, the steps can only be written before the first use."""
        members = self._members()
        first_use = min({user for member in members for user in member.users} - members)
        later = self.collectives[-1].node
        mask = self.attention.mask
        operands = [self.attention.lhs, *([] if mask is None else [mask]), *(c.input for c in self.collectives)]
        return [
            Placement(anchor, sorted(n for n in members if n < anchor), needed_behind(operands, anchor), operands)
            for anchor in ([later, first_use] if later < first_use else [first_use])
        ]

    def _members(self) -> set[fx.Node]:
        ends = {node for c in self.collectives for node in c.chain()}
        return {*ends, *self.between(), self.attention.node, *self.attention.results()}

    def read_in_place(self) -> bool:
        # A view of the earlier gather may stand before the later gather. The rewrite then moves the view down to
        # the later gather, and writes the site's steps before the view.
        return True

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        # CUDA's attention ops count as impure, so the rewrite erases them only if they are named here.
        return {self.attention.node, *self.attention.results()}

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Does nothing: operands are read from the arguments of attention and collectives."""

    def cut(self) -> tuple[list[Size], str] | None:
        return None

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return None

    def computed_ahead(self) -> list[str]:
        return []

# SPDX-License-Identifier: Apache-2.0
"""``HeldNodes``: the nodes of an attention, and of exchanges that send its keys and values.

Exchanges can run under the attention, if they start before it and their waits stand behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention import KEYS
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


@dataclass
class HeldNodes(SiteNodes):
    """keys and values -> views and copies -> attention. The same keys and values -> views and copies -> exchanges.

    ``exchanges`` are in graph order. One exchange may move both keys and values.
    """

    attention: AttentionNode
    exchanges: list[CollectiveNode]

    @property
    def collectives(self) -> list[CollectiveNode]:
        return self.exchanges

    @property
    def moved(self) -> list[CollectiveNode]:
        return self.exchanges

    @property
    def matmuls(self) -> list[MatmulNode]:
        return [self.attention]

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        """The dim of the keys. One factor of this dim (``layouts.Atom``) is the number of ranks whose keys it holds.
        This factor is 1, because the attention reads the keys of one rank only."""
        shape = tools.shape(self.attention.rhs)
        dims = [(*((Atom(1, rank=True),) if dim == KEYS else ()), Atom(size)) for dim, size in enumerate(shape)]
        return [ShardedDim.of(Layout(tuple(dims)))]

    @property
    def roles(self) -> list[str]:
        return ["K"]

    @property
    def tokens(self) -> Size:
        return self.attention.sizes[1]

    def matmul_sizes(self) -> list[MatmulSizes]:
        batch, queries, keys, width, columns = self.attention.sizes
        causal = self.attention.is_causal
        return [MatmulSizes(batch, queries, width + columns, keys, own="M", causal=causal)]

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        return False

    def early_readers(self) -> list[fx.Node]:
        """The nodes before the attention that are computed from the exchanges, in graph order: waits and readers."""
        found: set[fx.Node] = set()

        def visit(node: fx.Node) -> bool:
            early = node < self.attention.node
            found.update([node] if early else [])
            return early

        tools.walk([c.node for c in self.exchanges], visit)
        return sorted(found)

    def late_starts(self) -> list[CollectiveNode]:
        return [c for c in self.exchanges if self.attention.node < c.node]

    def places(self) -> list[Placement]:
        """At most one place for the site's steps. If an exchange starts after the attention, the place is right before
        the attention. If none does, but there are ``early_readers``, the place is right after the attention."""
        attention = self.attention.node
        operands = [node for c in self.late_starts() for node in c.node.all_input_nodes]
        if operands:
            return [Placement(attention, [], needed_behind(operands, attention), operands)]
        sunk = self.early_readers()
        return [Placement(attention.next, sunk, [], [])] if sunk else []

    def others(self) -> list[fx.Node]:
        return [node for place in self.places() for node in (*place.hoisted, *place.sunk)]

    def read_in_place(self) -> bool:
        return False

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        return set()

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Does nothing: operands are read from the arguments of the attention and of the exchanges."""

    def cut(self) -> tuple[list[Size], str] | None:
        return None

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return None

    def computed_ahead(self) -> list[str]:
        return []

# SPDX-License-Identifier: Apache-2.0
"""``PooledNodes``: lookups -> all-to-all. ``GradientNodes``: all-to-all -> gradients of the tables.

Each rank looks up the whole batch in its own tables. The all-to-all gives each rank the results of all tables for its
slice of the batch. In the backward graph, an all-to-all returns the gradients. A *block* holds the results or gradients
of one table for one rank's slice. A site orders its blocks by rank, and the blocks of one rank by table (``wire``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.lookups import LookupNode
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.placement import Placement
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import rounded


@dataclass
class TableNodes(SiteNodes):
    """What ``PooledNodes`` and ``GradientNodes`` have in common.

    Attributes:
        lookups: the lookups, or the gradients of the tables.
        block: layout of one table's blocks: the atom that counts the ranks, then the atoms of a block. An atom is a
            dim, or a factor of a dim (``layouts.Atom``).
        tables: layout of one dim that counts the tables.
    """

    collective: CollectiveNode
    lookups: list[LookupNode]
    block: Layout
    tables: Layout

    @property
    def count(self) -> int:
        (count,) = self.tables.shape()
        return int(count)

    @property
    def block_size(self) -> Size:
        return tools.numel(self.block.without_rank().shape())

    @property
    def wire(self) -> Layout:
        rank, *others = self.block.refined().dims
        return Layout((rank, *self.tables.dims, *others))

    @property
    def collectives(self) -> list[CollectiveNode]:
        return [self.collective]

    @property
    def matmuls(self) -> list[MatmulNode]:
        return list(self.lookups)

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        return [ShardedDim.of(self.block)] * len(self.lookups)

    @property
    def roles(self) -> list[str]:
        return [self._role] * len(self.lookups)

    @property
    def tokens(self) -> Size:
        return self.lookups[0].bags

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        return False

    def read_in_place(self) -> bool:
        return False

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        return set()

    def places(self) -> list[Placement]:
        return []

    def computed_ahead(self) -> list[str]:
        return []

    @property
    def _role(self) -> str:
        return "K" if self.lookups[0].kind == "embedding_gradient" else "M"


@dataclass
class PooledNodes(TableNodes):
    """lookups -> views, pointwise ops and sums -> cat -> views -> all-to-all.

    Attributes:
        parts: for each table, the tensor that the ``cat`` joins.
        between: the nodes between the parts and the collective, in graph order.
        sent, received: layouts of the collective's input and result, in the atoms of ``wire``.
        by_rank: whether the site looks up one rank's slice of the batch at a time. If not, the site looks up the whole
            batch, in one group of tables at a time.
    """

    parts: list[fx.Node]
    between: list[fx.Node]
    sent: Layout
    received: Layout
    by_rank: bool

    def matmul_sizes(self) -> list[MatmulSizes]:
        return [MatmulSizes([], m.bags, tools.shape(m.rhs)[-1], 0, "", _looked_up(m)) for m in self.lookups]

    def others(self) -> list[fx.Node]:
        return self.between

    def places(self) -> list[Placement]:
        """One ``Placement``: the site's steps are written before the first lookup. So the first tables' results can be
        sent before the last tables are looked up. Empty with ``by_rank``."""
        return [] if self.by_rank else [Placement(min(m.node for m in self.lookups), [], [], [])]

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        self.parts = [replaced.get(part, part) for part in self.parts]

    def cut(self) -> tuple[list[Size], str]:
        return [self.count], " by rank and table" if self.by_rank else " by table"

    def order_sent(self) -> tuple[Layout, Layout]:
        return self.wire, self.sent


@dataclass
class GradientNodes(TableNodes):
    """all-to-all -> views -> one slice for each table -> gradients of the tables.

    Attributes:
        slices: ``{node: number of its table}`` for the nodes that take one table's gradients from the result.
        read: layout of a node of ``slices``, in the atoms of ``wire``.
        source: the tensor that is sent: the collective's input, or the tensor of which the input is a permuted copy.
        last_first: whether the graph reads the last table's gradients first.
    """

    slices: dict[fx.Node, int]
    read: Layout
    source: fx.Node
    source_layout: Layout
    sent: Layout
    last_first: bool

    def matmul_sizes(self) -> list[MatmulSizes]:
        """The sizes of each gradient. ``MatmulSizes.own`` is M, because the tables of different ranks may have
        different numbers of rows."""
        return [MatmulSizes([], m.table_rows, tools.shape(m.rhs)[-1], 0, "M", _returned(m)) for m in self.lookups]

    def others(self) -> list[fx.Node]:
        return sorted(self.slices)

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        self.source = replaced.get(self.source, self.source)

    def cut(self) -> tuple[list[Size], str]:
        return [self.count], " by table, last first" if self.last_first else " by table"

    def order_sent(self) -> tuple[Layout, Layout]:
        return self.wire, self.sent


def _looked_up(lookup: LookupNode) -> int:
    """Bytes that a lookup reads and writes. The mean number of rows of a bag may differ between ranks. So the mean is
    rounded to a power of two, which is usually the same on all ranks."""
    bags, width = hint(lookup.bags), hint(tools.shape(lookup.rhs)[-1])
    each = hint(tools.numel(tools.shape(lookup.lhs))) / max(bags, 1)
    rows = 2 ** round(math.log2(each)) if each >= 1 else 1
    return (rows + 1) * bags * width * tools.dtype(lookup.rhs).itemsize


def _returned(gradient: LookupNode) -> int:
    """Bytes that a table's gradient reads and writes: its initial zeros, and three accesses for each added row."""
    indices = hint(tools.numel(tools.shape(gradient.lhs)))
    added = 2 ** round(math.log2(indices)) if indices else 0
    width = hint(tools.shape(gradient.rhs)[-1])
    return (rounded(hint(gradient.table_rows)) + 3 * added) * width * tools.dtype(gradient.rhs).itemsize

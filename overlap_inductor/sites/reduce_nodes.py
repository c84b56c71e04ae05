# SPDX-License-Identifier: Apache-2.0
"""``ReduceNodes``: the nodes of ``matmul -> reduce-scatter``, ``matmul -> all-reduce`` and ``matmul -> all-gather``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.grouped import GroupedNode
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.placement import Placement
from overlap_inductor.sites.side_by_side import joined_columns


@dataclass(frozen=True)
class Region:
    """The reductions over dims, the ``cat`` ops, and the ops that broadcast, between matmuls and collective
    (``passes.find_region``). Dims are numbered as in the matmuls' results.

    Attributes:
        reduced: for each reduction, the dims that it reduces.
        joined: for each ``cat``, the dim along which it joins.
        broadcast: for each broadcast tensor that is not a scalar, an op that reads it.
        places: for each tensor that the region reads from elsewhere, its layout.
        cut: the dim that is cut into pieces.
        layout: layout of the collective's input, over the dims that are not reduced.
    """

    reduced: dict[fx.Node, list[int]]
    joined: dict[fx.Node, int]
    broadcast: dict[fx.Node, fx.Node]
    places: dict[fx.Node, Layout]
    cut: int
    layout: Layout


@dataclass(frozen=True)
class Padding:
    """``node`` appends zeros to a rank's output before it is gathered, because other ranks' outputs are larger.

    ``columns``: how many columns ``node`` appends. 0 if ``node`` appends rows. ``ReduceNodes.sharded``
    then counts the appended rows as rows of a full shard that are missing (``ShardedDim.missing``).
    """

    node: fx.Node
    columns: int

    @property
    def source(self) -> fx.Node:
        return self.node.args[0]


@dataclass
class ReduceNodes(SiteNodes):
    """matmuls -> views and pointwise ops -> collectives.

    Attributes:
        ends: the collectives; several if the results of all-reduces are added.
        result: the wait, or the sum of the waits.
        leaves: the matmuls that compute the result, without those that compute a leaf's left operand.
        layouts: the layouts (``sites.layouts``) of the nodes that pieces compute or read. They consist of the same
            atoms (runs of indices, ``layouts.Atom``) as the layout of the collective's input.
        through: source of each view-like node.
        externals: tensors that the pieces read and the site does not compute.
        sharded: the dim that is cut, in the matmuls' output or in ``region.layout``.
        role: the role (M, N or B) of that dim.
        unfolded: biases that are sums of other matmuls of the site (``matmuls.folded``).
    """

    ends: list[CollectiveNode]
    result: fx.Node
    leaves: list[MatmulNode]
    layouts: dict[fx.Node, Layout]
    through: dict[fx.Node, fx.Node]
    externals: list[fx.Node]
    sharded: ShardedDim
    role: str
    unfolded: set[fx.Node] = field(default_factory=set)
    region: Region | None = None
    padding: Padding | None = None

    @property
    def computed(self) -> list[fx.Node]:
        """For each collective, its input before padding."""
        return [self.padding.source] if self.padding is not None else [c.input for c in self.collectives]

    def bias_of(self, matmul: MatmulNode) -> fx.Node | None:
        """The bias of ``matmul``, or ``None``. A sum of other matmuls of the site is no bias."""
        return None if matmul.bias in self.unfolded else matmul.bias

    def joined(self) -> fx.Node | None:
        """The ``cat`` that puts the gathered results of the ranks' matmuls side by side (``side_by_side``). ``None`` if
        there is none, or if the results are padded."""
        first = self.ends[0]
        if first.kind != "all_gather" or self.padding is not None or self.region is not None:
            return None
        return joined_columns(first.wait, first.world_size, self.shape[-1])

    @property
    def leaf_layout(self) -> Layout:
        return self.layouts[self.leaves[0].node] if self.region is None else self.region.layout

    @property
    def shape(self) -> list[Size]:
        return list(self.leaves[0].node.meta["val"].shape) if self.region is None else self.region.layout.shape()

    @property
    def padded_shape(self) -> list[Size]:
        """``shape`` with the rows or columns that this rank appends before a gather. Equal on every rank."""
        shape, sharded = self.shape, self.sharded
        if self.padding is None:
            return shape
        return [
            sharded.outer * sharded.chunk if sharded.short else shape[0],
            *shape[1:-1],
            shape[-1] + self.padding.columns,
        ]

    @property
    def collectives(self) -> list[CollectiveNode]:
        return self.ends

    @property
    def matmuls(self) -> list[MatmulNode]:
        """The leaves. Before each leaf come the grouped matmuls that compute its left operand."""
        return [m for leaf in self.leaves for m in (*_earlier(leaf), leaf)]

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        return [self.sharded] * len(self.matmuls)

    @property
    def roles(self) -> list[str]:
        return [self.role] * len(self.matmuls)

    @property
    def tokens(self) -> Size:
        """The number of rows of the matmuls' result, including padding."""
        return self.padded_shape[-2]

    def matmul_sizes(self) -> list[MatmulSizes]:
        """``MatmulSizes.own`` is K for a leaf, and N and K for a matmul before a leaf. Ranks may have uneven shards of
        these dims."""
        found = []
        for leaf in self.leaves:
            masked = isinstance(leaf, GroupedMatmul) and leaf.is_masked
            for matmul in (*_earlier(leaf), leaf):
                *batch, m, k = tools.shape(matmul.lhs)
                n = tools.shape(matmul.rhs)[-1]
                *_, m, n = self.padded_shape if self.padding is not None else (m, n)
                if masked:
                    # This rank's number of rows is known only at run time, so the mean over the ranks is taken.
                    m = m // self.ends[0].world_size
                found.append(MatmulSizes(batch, m, n, k, own="K" if matmul is leaf else "NK"))
        return found

    @property
    def is_sum(self) -> bool:
        return True

    def hands_out_gathered(self) -> bool:
        return False

    def others(self) -> list[fx.Node]:
        return [n for n in self.layouts if n.op == "call_function"] + [n for m in self.leaves for n in m.inner]

    def places(self) -> list[Placement]:
        return []

    def read_in_place(self) -> bool:
        return False

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        return set()

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        self.externals = [replaced.get(n, n) for n in self.externals]
        for old, new in replaced.items():
            if old in self.layouts:
                self.layouts[new] = self.layouts[old]
                # If another site's epilogue now computes a node of this site, this site reads it as an external tensor.
                if new not in self.externals and old not in {m.node for m in self.leaves}:
                    self.externals.append(new)
                if self.region is not None and old in self.region.places:
                    self.region.places[new] = self.region.places[old]
        self.through = {n: replaced.get(source, source) for n, source in self.through.items()}

    def cut(self) -> tuple[list[Size], str]:
        """See ``SiteNodes.cut``. The sizes are ``outer`` and ``chunk`` of the dim that is cut (``ShardedDim``). For a
        gathered output, the only size is the number of rows with padding."""
        if self.ends[0].kind == "all_gather":
            return self.padded_shape[:1], ""
        return [self.sharded.outer, self.sharded.chunk], f" on dim {self.sharded.dim}"

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return self.leaf_layout, self.layouts[self.computed[0]]

    def computed_ahead(self) -> list[str]:
        return []


def _earlier(leaf: MatmulNode) -> list[GroupedNode]:
    return leaf.earlier if isinstance(leaf, GroupedMatmul) else []

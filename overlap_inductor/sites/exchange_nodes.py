# SPDX-License-Identifier: Apache-2.0
"""``SentNodes``: matmul -> all-to-all. ``ReceivedNodes``: all-to-all -> matmul.

``SentNodes`` are like the nodes of a reduce-scatter without the sum, ``ReceivedNodes`` like those of an all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.reduce_nodes import ReduceNodes


@dataclass
class SentNodes(ReduceNodes):
    """matmuls -> views and pointwise ops -> all-to-all.

    ``received``: layout of the collective's result. It lists the atoms of each dim. An atom is a dim, or a factor of a
    dim (``layouts.Atom``).
    """

    received: Layout = field(default_factory=lambda: Layout(()))

    @property
    def row_wise(self) -> list[fx.Node]:
        """Empty: no op between the matmul and the all-to-all needs whole rows. Sites with such an op have
        ``BandedNodes``, which return the ops."""
        return []

    @property
    def lead(self) -> Size:
        """The size of the outermost dim of a rank's slice, in the matmuls' layout. Sub-chunks cut this dim, so each
        sub-chunk is a contiguous run of the slice."""
        sharded = self.sharded
        if sharded.dim:
            return self.shape[0]
        return sharded.chunk if isinstance(sharded.outer, int) and sharded.outer == 1 else sharded.outer

    @property
    def rest(self) -> Size:
        """The number of elements of a rank's slice at each index of its outermost dim."""
        sharded = self.sharded
        others = [sharded.outer * sharded.chunk if d == sharded.dim else s for d, s in enumerate(self.shape)][1:]
        inside = [] if sharded.dim or (isinstance(sharded.outer, int) and sharded.outer == 1) else [sharded.chunk]
        return tools.numel([*inside, *others])

    @property
    def wire(self) -> Layout:
        """The layout of the buffer into which a schedule receives: one slice after the other, by rank. Within a slice,
        elements have the order of the matmuls' result. The schedule then converts the buffer to ``received``."""
        rank = next(a for a in self.received.flat() if a.rank)
        return Layout(((rank,), *self.leaf_layout.without_rank().dims))


@dataclass
class ReceivedNodes(GatherNodes):
    """all-to-all -> views and pointwise ops -> matmuls.

    Attributes:
        source: the tensor whose elements are sent, in layout ``raw``: the collective's input, or the tensor of which
            the input is a view or a permuted copy.
        source_layout: layout of ``source``, in the atoms of ``raw``.
        given: layout of the collective's result.
        raw: layout of what is sent: one slice for each rank. Within a slice, elements have the order in which the first
            matmul reads them. If the all-to-all's own order is kept (``passes.find_received``), they have the order of
            ``given``.
    """

    source: fx.Node = field(kw_only=True)
    source_layout: Layout = field(kw_only=True)
    given: Layout = field(kw_only=True)

    @property
    def shard_shape(self) -> list[Size]:
        return self.raw.without_rank().shape()

    def others(self) -> list[fx.Node]:
        return [*self._copied(), *super().others()]

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        self.source = replaced.get(self.source, self.source)

    def order_sent(self) -> tuple[Layout, Layout]:
        return self.raw, self.given

    def _copied(self) -> list[fx.Node]:
        """The views and copies between ``source`` and the collective, in graph order."""
        found, node = [], self.collective.input
        while node is not self.source:
            found.append(node)
            node = node.args[0]
        return found[::-1]

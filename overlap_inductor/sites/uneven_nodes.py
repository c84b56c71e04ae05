# SPDX-License-Identifier: Apache-2.0
"""``UnevenSentNodes``, ``UnevenReceivedNodes``: an all-to-all after or before matmuls. Its parts may have different
numbers of rows.

The parts are rows of the matmuls' result or operand, in the collective's own order. A part's number of rows may be
known only at run time. Ranks do not compare these numbers: the program must give sender and receiver the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.all_to_all import Splits
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.reduce_nodes import ReduceNodes


@dataclass
class UnevenSentNodes(ReduceNodes):
    """matmuls -> views, casts and sums -> all-to-all of parts that may differ in size."""

    @property
    def splits(self) -> Splits:
        return Splits.of(self.ends[0].node)

    def uneven_rows(self) -> list[Size]:
        return _rows(self.ends[0])

    def matmul_sizes(self) -> list[MatmulSizes]:
        """Like ``ReduceNodes.matmul_sizes``, but M may differ between ranks, too."""
        return [replace(sizes, own=f"M{sizes.own}") for sizes in super().matmul_sizes()]


@dataclass
class UnevenReceivedNodes(GatherNodes):
    """all-to-all of parts that may differ in size -> views -> matmuls."""

    @property
    def splits(self) -> Splits:
        return Splits.of(self.collective.node)

    @property
    def given(self) -> Layout:
        return self.raw

    @property
    def tokens(self) -> Size:
        """The number of rows that this rank sends. The number that arrives may be known only at run time."""
        return tools.shape(self.collective.input)[0]

    def uneven_rows(self) -> list[Size]:
        return _rows(self.collective)

    def matmul_sizes(self) -> list[MatmulSizes]:
        """Like ``GatherNodes.matmul_sizes``, with ``tokens`` in place of the number of rows that arrive. All sizes
        may differ between ranks."""
        found = []
        for consumer, sizes in zip(self.consumers, super().matmul_sizes(), strict=True):
            sized = {"M": sizes.m, "N": sizes.n, "K": sizes.k} | {consumer.role: self.tokens}
            found.append(MatmulSizes(sizes.batch, sized["M"], sized["N"], sized["K"], own="MNK"))
        return found


def _rows(collective: CollectiveNode) -> list[Size]:
    ends: tuple[fx.Node, ...] = (collective.input, collective.wait)
    return [tools.shape(end)[0] for end in ends]

# SPDX-License-Identifier: Apache-2.0
"""``BandedNodes``: the nodes of ``matmul -> row-wise ops -> all-to-all``, computed in bands of tokens.

Row-wise ops (``sites.row_wise``), such as a norm, may need all columns of a row. So a piece is a *band*: some rows of
the matmul with all columns. A band holds a part of every rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import product


@dataclass
class BandedNodes(SentNodes):
    """matmul -> views and row-wise ops -> all-to-all.

    An *atom* is a dim or a factor of a dim. A *rank atom* counts ranks (``sites.layouts``).

    Attributes:
        layouts: the layouts of the nodes from the matmul to the all-to-all. In each layout, the dim
            that holds the matmul's rows begins with a rank atom of size 1. By this atom, ``sites.row_wise`` knows which
            dim holds the rows.
        receivers: the atom of the all-to-all's input that has one index for each receiving rank.
        band: the atom of the matmul's rows along which bands are cut.
        slice: the atoms of a rank's slice, in the order of the all-to-all's input.
        kept: the nodes in ``layouts`` that nodes behind the all-to-all also read.
    """

    receivers: Atom = field(kw_only=True)
    band: Atom = field(kw_only=True)
    slice: list[Atom] = field(kw_only=True)
    kept: list[fx.Node] = field(kw_only=True)

    @property
    def row_wise(self) -> list[fx.Node]:
        leaf = self.leaves[0].node
        return [n for n in self.layouts if n is not leaf and n not in self.through]

    @property
    def lead(self) -> Size:
        return self.band.size

    @property
    def rest(self) -> Size:
        return product([a for a in self.slice if a is not self.band])

    @property
    def unit(self) -> Size:
        """Rows of the matmul for each index of ``band``."""
        return tools.shape(self.leaves[0].lhs)[0] // self.band.size

    @property
    def in_bands(self) -> Layout:
        """The layout of a band as it is sent: for each rank, one run of elements of the rank's slice."""
        others = [a for a in self.slice if a is not self.band]
        return Layout(((self.receivers,), (self.band, *others)))

    @property
    def wire(self) -> Layout:
        rank = next(a for a in self.received.flat() if a.rank)
        return Layout(((rank,), *self.in_bands.dims[1:]))

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        super().rename(replaced)
        self.kept = [replaced.get(n, n) for n in self.kept]

    def order_sent(self) -> tuple[Layout, Layout]:
        return self.in_bands, Layout(((self.receivers,), tuple(self.slice)))

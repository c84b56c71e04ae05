# SPDX-License-Identifier: Apache-2.0
"""``DispatchedNodes``: all-to-all -> index -> experts -> index put -> all-to-all.

The first exchange brings rows to the ranks of their experts, and the second one returns them::

    x = wait_tensor(all_to_all(...))[index]      # rows in the order of the experts
    y = experts(x, rows of other tensors)        # grouped matmuls and pointwise ops
    all_to_all(index_put(empty, [index], y))     # rows in the order in which they arrived
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import sorted_parts
from overlap_inductor.sites.all_to_all import Splits
from overlap_inductor.sites.grouped import KIND
from overlap_inductor.sites.grouped import GroupedNode
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.placement import Placement
from overlap_inductor.sites.row_operands import Operands
from overlap_inductor.sites.row_operands import operands_of
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.torch_compat import operators


@dataclass
class DispatchedNodes(SiteNodes):
    """See the module.

    Attributes:
        dispatch, combine: the two exchanges.
        steps: the nodes that compute the experts' rows, in graph order, first the ``index`` op.
        put: the ``index_put`` that brings the rows back into the order in which they arrived.
    """

    dispatch: CollectiveNode
    combine: CollectiveNode
    steps: list[fx.Node]
    put: fx.Node

    @property
    def index(self) -> fx.Node:
        """For each row in the order of the experts, its place among the rows that arrived."""
        return self.put.args[1][0]

    @property
    def arrive_sorted(self) -> bool:
        """Whether each rank's rows are known to arrive in the order of the experts."""
        return sorted_parts.are_sorted(self.index, self.splits.received)

    @property
    def ends(self) -> fx.Node:
        return self.grouped[0].ends

    @property
    def grouped(self) -> list[GroupedNode]:
        return [GroupedNode(n, KIND) for n in self.steps if is_grouped(n)]

    @property
    def splits(self) -> Splits:
        """How many rows this rank sends to and receives from each rank in the first exchange. The second exchange
        returns the received rows."""
        return Splits.of(self.dispatch.node)

    @property
    def collectives(self) -> list[CollectiveNode]:
        return [self.dispatch, self.combine]

    @property
    def returns(self) -> bool:
        return True

    @property
    def matmuls(self) -> list[MatmulNode]:
        return list(self.grouped)

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        rows = tools.shape(self.dispatch.wait)[0]
        return [ShardedDim.of(Layout.uneven(rows, [Atom(tools.shape(m.node)[1])])) for m in self.grouped]

    @property
    def roles(self) -> list[str]:
        return ["M"] * len(self.grouped)

    @property
    def tokens(self) -> Size:
        """The number of rows that this rank sends. The number that arrives is known only at run time."""
        return tools.shape(self.dispatch.input)[0]

    def matmul_sizes(self) -> list[MatmulSizes]:
        """A rank is expected to receive as many rows as it sends: the number that arrives is known only at run time."""
        return [
            MatmulSizes([], self.tokens, tools.shape(m.rhs)[-1], tools.shape(m.lhs)[-1], own="MNK")
            for m in self.grouped
        ]

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        return bool(self.handed_out())

    def handed_out(self) -> list[fx.Node]:
        """The steps that nodes outside the site also read, for example the graph's output."""
        members = {*self.steps, self.put}
        return [n for n in self.steps if any(user not in members for user in n.users)]

    def others(self) -> list[fx.Node]:
        return [*self.steps, self.put, *self._readers()]

    def places(self) -> list[Placement]:
        """There is one place for the nodes that the rewrite writes: right before the second exchange. Nodes outside
        the site that stand before this place, and are computed from ``self.steps``, move down to this place."""
        return [Placement(self.combine.node, self._readers(), [], [])]

    def _readers(self) -> list[fx.Node]:
        """Nodes outside the site and before the second exchange that are computed from the steps."""
        members, found = {*self.steps, self.put}, set[fx.Node]()

        def visit(node: fx.Node) -> bool:
            if node in members or not node < self.combine.node:
                return False
            found.add(node)
            return True

        tools.walk(self.steps, visit)
        return sorted(found)

    def immovable(self) -> fx.Node | None:
        """A node that would have to move down but must not, or ``None``."""
        return next((n for n in self._readers() if n.is_impure() or operators.is_functional_collective(n)), None)

    def read_in_place(self) -> bool:
        return True

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        return set()

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Does nothing: what the steps read is taken from their arguments."""

    def cut(self) -> tuple[list[Size], str] | None:
        return None

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return None

    def computed_ahead(self) -> list[str]:
        return []

    def uneven_rows(self) -> list[Size]:
        return [tools.shape(end)[0] for end in (self.dispatch.input, self.dispatch.wait)]

    def operands(self) -> Operands:
        """The steps after the ``index`` op as a program, and what it reads. Raises ``ValueError`` if a step's argument
        cannot be written as text."""
        first, *steps = self.steps
        return operands_of([first], steps, self.ends, self.put.args[2], self.handed_out())

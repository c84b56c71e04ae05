# SPDX-License-Identifier: Apache-2.0
"""The parts of a site: its collectives, its matmuls and ``SiteNodes``, the interface of every kind of site.

``sites.gather_nodes`` and ``sites.reduce_nodes`` implement ``SiteNodes``. ``facts.site.SiteFacts`` holds what a report
says of a site.
"""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import TypeVar

from torch import fx

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.placement import Placement


@dataclass(frozen=True)
class CollectiveNode:
    """A functional collective and its wait. ``node.args[0]`` is the input; ``wait`` is the result, the last wait if a
    program waits several times. ``ranks``: global ranks of the group."""

    node: fx.Node
    wait: fx.Node
    kind: str
    group_name: str
    ranks: tuple[int, ...] | None
    reduce_op: str | None = None

    @property
    def input(self) -> fx.Node:
        return self.node.args[0]

    def chain(self) -> list[fx.Node]:
        """The result's wait, the waits that it waits for, and the collective."""
        found = [self.wait]
        while found[-1] is not self.node:
            found.append(found[-1].args[0])
        return found

    @property
    def world_size(self) -> int:
        return len(self.ranks) if self.ranks else 0


@dataclass(frozen=True)
class MatmulSizes:
    """Sizes of one matmul, ints or symbolic. ``own``: the dims (M, N, K) whose size may differ between ranks."""

    batch: list[Size]
    m: Size
    n: Size
    k: Size
    own: str


class SiteNodes(ABC):
    """The FX nodes of one site. A schedule reads the nodes of the kind that it computes; all other code uses this
    interface only."""

    @property
    @abstractmethod
    def collectives(self) -> list[CollectiveNode]:
        """The collectives that the site replaces, in graph order. The first one gives the site's place and group."""

    @property
    @abstractmethod
    def matmuls(self) -> list[MatmulNode]:
        """The matmuls that the site computes in pieces."""

    @property
    @abstractmethod
    def sharded_dims(self) -> list[ShardedDim]:
        """The dim of each matmul that is cut by rank: of the operand, or of the result."""

    @property
    @abstractmethod
    def roles(self) -> list[str]:
        """The role (M, N, K or B) of that dim in each matmul."""

    @property
    @abstractmethod
    def tokens(self) -> Size:
        """The token count, in rows of the rank's own matmul: an int or a symbolic size."""

    @abstractmethod
    def matmul_sizes(self) -> list[MatmulSizes]:
        """The sizes of each matmul, with the padding that a rank appends before it sends."""

    @property
    @abstractmethod
    def is_sum(self) -> bool:
        """Whether the matmuls' results are added to each other, so that the matmuls run one after the other."""

    @abstractmethod
    def hands_out_gathered(self) -> bool:
        """Whether nodes outside the site read the gathered tensor."""

    @abstractmethod
    def others(self) -> list[fx.Node]:
        """The nodes of the current graph, besides matmuls and collectives, that the site computes, moves or erases."""

    @abstractmethod
    def places(self) -> list[Placement]:
        """The places in the current graph at which the steps may be written, the best one first. Empty if the site is
        written at its collective and moves no node."""

    @abstractmethod
    def read_in_place(self) -> bool:
        """Whether nodes outside the site read a node between the collective and the matmuls. The steps must then stand
        before all nodes that move with the site."""

    @abstractmethod
    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """The nodes that may be erased once ``replaced`` has taken the site's results, besides the collectives."""

    @abstractmethod
    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Update the site after another site's rewrite, which replaced the keys of ``replaced`` by its values."""

    @abstractmethod
    def cut(self) -> tuple[list[Size], str] | None:
        """``(sizes, words)`` of what all schedules cut for the transfer, the same on all ranks; ``None`` if the
        schedule alone knows."""

    @abstractmethod
    def order_sent(self) -> tuple[Layout, Layout] | None:
        """``(layout in which pieces are computed, layout in which they are sent)``; ``None`` if both are
        the same."""

    @abstractmethod
    def computed_ahead(self) -> list[str]:
        """One text for each node that may be computed on a shard before it is sent, in graph order. The texts are the
        same on all ranks: they name no nodes."""

    def place(self) -> Placement | None:
        """The first of ``places`` without an obstacle, else the first one; ``None`` if there are none."""
        found = self.places()
        return next((p for p in found if p.obstacle is None), found[0] if found else None)


@dataclass
class OverlapSite:
    """A site found in one graph. ``facts``: for reports and plans; ``nodes``: for the rewrite; ``obstacle``: why the
    site must stay as written, if the finder saw a reason."""

    facts: SiteFacts
    nodes: SiteNodes
    obstacle: Reason | None = None

    @property
    def collectives(self) -> list[CollectiveNode]:
        return self.nodes.collectives

    @property
    def matmuls(self) -> list[MatmulNode]:
        return self.nodes.matmuls

    def decided(self, decision: Decision) -> DecidedSite:
        """The site with its decision. Both share their nodes."""
        return DecidedSite(self.facts, self.nodes, self.obstacle, decision=decision)


@dataclass
class DecidedSite(OverlapSite):
    """A site with the planner's decision."""

    decision: Decision = field(kw_only=True)


Kind = TypeVar("Kind", bound=SiteNodes)


def nodes_of(site: OverlapSite, kind: type[Kind]) -> Kind:
    """The site's nodes, for a schedule that computes this kind only.

    Raises:
        TypeError: the site is of another kind. The schedule then names a pattern that it does not compute.
    """
    if not isinstance(site.nodes, kind):
        raise TypeError(
            f"site {site.facts.id} ({site.facts.pattern}) has {type(site.nodes).__name__}; expected {kind.__name__}."
            " Remove the pattern from the schedule's patterns."
        )
    return site.nodes

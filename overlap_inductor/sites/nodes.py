# SPDX-License-Identifier: Apache-2.0
"""``OverlapSite``: a site in a graph. ``SiteNodes``: the interface of every kind of site (``sites.*_nodes``)."""

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
    """A functional collective and its wait. ``node.args[0]`` is the input.

    Attributes:
        wait: the last wait, which holds the result. ``node`` itself if the op needs no wait.
        ranks: global ranks of the group.
    """

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
        """All waits, the last one first, then the collective."""
        found = [self.wait]
        while found[-1] is not self.node:
            found.append(found[-1].args[0])
        return found

    @property
    def world_size(self) -> int:
        return len(self.ranks) if self.ranks else 0


@dataclass(frozen=True)
class MatmulSizes:
    """Sizes of one matmul, ints or symbolic.

    Attributes:
        own: the dims (M, N, K) whose size may differ between ranks.
        memory: bytes that a lookup or a table's gradient reads and writes; 0 for a matmul.
        causal: for attention, whether the op as written skips, for each query (M), the keys (K) after this query. A
            schedule's pieces do not skip them.
    """

    batch: list[Size]
    m: Size
    n: Size
    k: Size
    own: str
    memory: int = 0
    causal: bool = False


class SiteNodes(ABC):
    """The FX nodes of one site. Schedules and the sequence-parallel rewrite also read attributes of a subclass
    (``nodes_of``)."""

    @property
    @abstractmethod
    def collectives(self) -> list[CollectiveNode]:
        """The collectives that the site replaces, in graph order. The first one gives the site its group and its id."""

    @property
    def moved(self) -> list[CollectiveNode]:
        """The first collective. A subclass may add collectives whose tensors move together with its tensor."""
        return self.collectives[:1]

    @property
    def returns(self) -> bool:
        """Whether a second collective of the site returns as many rows as the first one sent."""
        return False

    @property
    @abstractmethod
    def matmuls(self) -> list[MatmulNode]:
        """The matmuls that the site computes in pieces."""

    @property
    @abstractmethod
    def sharded_dims(self) -> list[ShardedDim]:
        """For each matmul, the dim that is divided among the ranks, or cut into bands if an output is gathered.

        It is a dim of an operand, of the result, of ``ReduceNodes.region.layout`` or of ``TableNodes.block``.
        """

    @property
    @abstractmethod
    def roles(self) -> list[str]:
        """For each matmul, the role (M, N, K or B) of its dim in ``sharded_dims``."""

    @property
    @abstractmethod
    def tokens(self) -> Size:
        """The token count, an int or a symbolic size:

        - in all cases but those below: the number of rows of the matmuls' result;
        - after a gather: the size of the gathered dim;
        - for attention: the number of queries;
        - after an uneven all-to-all: the number of rows that this rank sends;
        - for lookups: the number of bags.
        """

    @abstractmethod
    def matmul_sizes(self) -> list[MatmulSizes]:
        """The sizes of each matmul. They include the padding that this rank appends before a gather of the output."""

    @property
    @abstractmethod
    def is_sum(self) -> bool:
        """Whether all matmuls together compute the tensor that the collective moves, by sums or ``cat``. If so, they
        run one after the other."""

    @abstractmethod
    def hands_out_gathered(self) -> bool:
        """Whether a node other than the site's matmuls reads the gathered tensor or a view, copy or split of it. For
        ``DispatchedNodes``: whether a node outside the site reads one of its ``steps``."""

    @abstractmethod
    def others(self) -> list[fx.Node]:
        """The nodes that the site computes, moves or erases, without its collectives. Views and padding that only
        become unused may be missing."""

    @abstractmethod
    def places(self) -> list[Placement]:
        """Candidate places for the steps (the nodes that the rewrite writes), best first.

        Empty if no node has to move. Then the steps go before ``SiteSchedule.anchor`` or the last collective.
        """

    @abstractmethod
    def read_in_place(self) -> bool:
        """Whether nodes outside the site may read a node between the collectives and the site's results. If so, the
        steps are written before the nodes that are moved down (``Placement.sunk``)."""

    @abstractmethod
    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """The nodes that may be erased after a rewrite, without the collectives. The rewrite replaced the keys of
        ``replaced`` by its values."""

    @abstractmethod
    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Update the site after another site's rewrite, which replaced the keys of ``replaced`` by its values."""

    @abstractmethod
    def cut(self) -> tuple[list[Size], str] | None:
        """``(sizes of the dims that are cut for the transfer, text that follows the sizes in the ranks' plans)``, equal
        on all ranks (``ExchangeTerms.cut``). ``None`` if the cut depends on the schedule."""

    @abstractmethod
    def order_sent(self) -> tuple[Layout, Layout] | None:
        """``(layout of the site's pieces, layout of the tensor that the collective sends or receives)``, without this
        rank's padding. ``None`` if they cannot differ."""

    @abstractmethod
    def computed_ahead(self) -> list[str]:
        """One text for each node that may be computed on a shard before it is sent, in graph order. Ranks compare the
        texts, so the texts hold no node names."""

    def uneven_rows(self) -> list[Size]:
        """Empty: the ranks' parts are equal. If the parts may differ, a subclass returns the numbers of rows that this
        rank sends and receives. These numbers may be known only at run time."""
        return []

    def place(self) -> Placement | None:
        """The first of ``places`` without an obstacle, else the first one; ``None`` if there are none."""
        found = self.places()
        return next((p for p in found if p.obstacle is None), found[0] if found else None)


@dataclass
class OverlapSite:
    """A site found in one graph. ``obstacle``: why it must stay as written, or ``None``."""

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
        """This site with ``decision``. The new object shares ``nodes`` with this one."""
        return DecidedSite(self.facts, self.nodes, self.obstacle, decision=decision)


@dataclass
class DecidedSite(OverlapSite):
    decision: Decision = field(kw_only=True)


Kind = TypeVar("Kind", bound=SiteNodes)
Choice = TypeVar("Choice")


def nodes_of(site: OverlapSite, kind: type[Kind]) -> Kind:
    """The site's nodes as an instance of ``kind``.

    Raises:
        TypeError: the nodes are of another kind.
    """
    if not isinstance(site.nodes, kind):
        raise TypeError(
            f"site {site.facts.id} ({site.facts.pattern}) has {type(site.nodes).__name__}; expected {kind.__name__}."
            " Remove the pattern from the schedule's patterns."
        )
    return site.nodes


def by_nodes(choices: Mapping[type[SiteNodes], Choice], site: OverlapSite) -> Choice:
    """The entry of ``choices`` for the class of the site's nodes, or for the nearest base class.

    Raises:
        TypeError: there is no such entry.
    """
    found = next((kind for kind in type(site.nodes).__mro__ if kind in choices), None)
    if found is None:
        kinds = " or ".join(kind.__name__ for kind in choices)
        raise TypeError(f"site {site.facts.id} has {type(site.nodes).__name__}; expected {kinds}")
    return choices[found]

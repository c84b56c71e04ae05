# SPDX-License-Identifier: Apache-2.0
"""``Pattern``: the interface through which the finder asks for one pattern's sites.

Each pattern has one implementation. ``passes.patterns`` lists them. A pattern starts at a collective of its kind. It
returns a ``Match`` with the site's nodes, or a ``Miss`` with reasons::

    y = mm(wait_tensor(all_gather(x)), w)    AllGatherMatmul.find(all_gather) -> Match(GatherNodes(...))
    y = wait_tensor(all_gather(x)) + 1       AllGatherMatmul.find(all_gather) -> Miss([])
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import SiteNodes


@dataclass(frozen=True)
class Match:
    """The site that a pattern found at a collective.

    Attributes:
        nodes: the site's nodes.
        dim: the dim that is gathered or scattered, as in ``facts.site.Collective``.
        role: the role (M, N, K or B) that the cut dim has in the first matmul, or ``None``.
        obstacle: why the site must stay as written although it was found; ``None`` if it may be rewritten.
        left: matmuls that stay with other sites. This site reads their results, or sums of them, as plain tensors.
    """

    nodes: SiteNodes
    dim: int | None = None
    role: str | None = None
    obstacle: Reason | None = None
    left: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Miss:
    """The answer of a pattern that found no site at a collective.

    Attributes:
        reasons: why there is no site; empty if the graph around the collective does not resemble the pattern.
        final: if true, the finder does not ask the patterns after this one.
        anchor: if ``final``, the node whose module the report names; ``None`` for the collective itself. Without
            ``final``, the finder does not read ``anchor``.
        left: as in ``Match``.
    """

    reasons: list[Reason] = field(default_factory=list)
    final: bool = False
    anchor: fx.Node | None = None
    left: list[fx.Node] = field(default_factory=list)


class Search(Protocol):
    """What a pattern may read of the walk over the graph.

    Attributes:
        phase: inference, forward or backward.
        collectives: every collective of the graph, as ``sites.collectives.find_collectives`` gives it.
        merged: collectives of sites with several collectives. Such a site is found at the first of its collectives. The
            pattern adds at least the site's later collectives here, and the finder skips these.
    """

    phase: str
    merged: set[fx.Node]

    @property
    def collectives(self) -> Mapping[fx.Node, tuple[fx.Node, str, CollectiveNode | Reason]]: ...

    def owned(self) -> set[fx.Node]:
        """The matmuls of the sites found so far, and those of all sites of early patterns. If ``SiteFinder.idle``
        names a site's first collective, that site's matmuls are left out."""
        ...

    def taken(self) -> set[fx.Node]:
        """The collectives of the sites found so far and of all sites of early patterns. A pattern whose sites have
        several collectives must not claim a collective that is in this set."""
        ...


@dataclass(frozen=True)
class Example:
    """The pattern as a model writes it: a linear layer next to a collective. The benchmarks and the tests use it.

    Attributes:
        first: whether the collective comes before the matmul and moves its left operand; else it comes after the matmul
            and moves the result.
        shards_tokens: whether each rank holds only its shard of the tokens: before the layer if ``first``, else after.
        column_parallel: whether the layer's columns (N) are split between ranks; else its contracted dim (K) is.
        traced: the collective ``(tensor [rows, ...], group) -> result``, written with functional collectives that
            torch.compile traces.
        eager: the same collective without a graph. It may overwrite its argument.
    """

    first: bool
    shards_tokens: bool
    column_parallel: bool
    traced: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    eager: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class Pattern(Protocol):
    """Finds the sites of one pattern.

    Attributes:
        name: the name in reports and in ``OVERLAP_INDUCTOR_PATTERNS``.
        kind: the kind of collective at which the pattern starts: all_gather, reduce_scatter, all_reduce, all_to_all.
        early: if true, ``find`` reads neither ``Search.owned`` nor ``Search.taken``. The pattern's sites are then found
            before all other sites. Other sites do not claim an early site's collectives. They take an early site's
            matmul into a sum only if ``SiteFinder.idle`` names the early site's collective.
        example: the pattern as a model writes it; ``None`` if it has no linear layer.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def early(self) -> bool: ...

    @property
    def example(self) -> Example | None: ...

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        """Look for a site at ``collective``. The graph does not change."""
        ...

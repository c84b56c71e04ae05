# SPDX-License-Identifier: Apache-2.0
"""``Pattern``: the interface through which the finder asks for one pattern's sites.

A pattern starts at a collective of its kind. It returns a ``Match`` with the site's nodes, or a ``Miss`` with reasons::

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
        dim: the dim that is gathered or scattered, as in ``facts.site.Collective``.
        role: the role (M, N, K or B) of the gathered or scattered dim in the first matmul, or ``None``.
        obstacle: why the site must stay as written, or ``None``.
        left: matmuls that the pattern leaves to other sites.
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
        reasons: why there is no site; empty if nothing resembles the pattern.
        final: whether the finder asks no further pattern.
        anchor: if ``final``, the node whose module the report names. ``None``: it names the collective's module.
        left: as in ``Match``.
    """

    reasons: list[Reason] = field(default_factory=list)
    final: bool = False
    anchor: fx.Node | None = None
    left: list[fx.Node] = field(default_factory=list)


class Search(Protocol):
    """What a pattern may use of the finder (``passes.find.SiteFinder``).

    Attributes:
        phase: inference, forward or backward.
        collectives: every collective of the graph, as ``sites.collectives.find_collectives`` gives it.
        merged: collectives that the finder skips. A pattern adds the further collectives of its site.
    """

    phase: str
    merged: set[fx.Node]

    @property
    def collectives(self) -> Mapping[fx.Node, tuple[fx.Node, str, CollectiveNode | Reason]]: ...

    def owned(self) -> set[fx.Node]:
        """The matmuls of the sites found so far and of all early sites (``Pattern.early``). Sites of collectives in
        ``SiteFinder.idle`` are left out, because they leave their matmuls to other sites."""
        ...

    def taken(self) -> set[fx.Node]:
        """The collectives of the sites found so far and of all early sites. No new site may take them as further
        collectives."""
        ...


@dataclass(frozen=True)
class Example:
    """The pattern as a model writes it: a linear layer next to a collective.

    Attributes:
        first: whether the collective comes before the matmul and moves its left operand. If false, it comes after the
            matmul and moves the result.
        shards_tokens: whether each rank holds only its shard of the tokens: before the layer if ``first``, else after.
        column_parallel: whether the ranks split the layer's columns (N) or, if false, its contracted dim (K).
        traced: ``(tensor [rows, ...], group) -> result`` with functional collectives.
        eager: the same for eager code. It may overwrite its argument.
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
        kind: the kind of collective at which the pattern starts.
        early: whether the pattern's sites (*early sites*) are found before all other sites. If so, ``find`` must read
            neither ``Search.owned`` nor ``Search.taken``.
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

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
        dim: the logical dim that the user gathered or scattered, or ``None``.
        role: the role (M, N, K or B) of that dim in the first matmul, or ``None``.
        obstacle: why the site must stay as written although it was found; ``None`` if nothing speaks against it.
        left: matmuls of other sites that this site reads as plain tensors.
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
        final: whether the finder must not ask the patterns after this one.
        anchor: the node whose module the report names, if not the collective's.
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
        merged: collectives that belong to the site of an earlier one. A pattern adds to it.
    """

    phase: str
    merged: set[fx.Node]

    @property
    def collectives(self) -> Mapping[fx.Node, tuple[fx.Node, str, CollectiveNode | Reason]]: ...

    def owned(self) -> set[fx.Node]:
        """The matmuls of the sites found so far, and of all sites of early patterns."""
        ...


@dataclass(frozen=True)
class Example:
    """The pattern as a model writes it: a linear layer next to a collective. The bench and the tests use it.

    Attributes:
        first: whether the collective stands before the matmul and moves its left operand; else it moves the result.
        shards_tokens: whether each rank holds a shard of the tokens before the layer, or after it.
        column_parallel: whether the layer's columns (N) are split between ranks; else its contracted dim (K) is.
        traced: ``(tensor [rows, ...], group) -> result``, in functional collectives that torch.compile traces.
        eager: the same without a graph. It may overwrite its argument.
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
        early: whether its sites do not depend on ``Search.owned``. They are found before all other sites, and a sum of
            another site never includes their matmuls.
        example: the pattern as a model writes it.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def early(self) -> bool: ...

    @property
    def example(self) -> Example: ...

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        """Look for a site at ``collective``. The graph does not change."""
        ...

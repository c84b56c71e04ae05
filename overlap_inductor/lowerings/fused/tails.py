# SPDX-License-Identifier: Apache-2.0
"""Finds the pointwise ops after a site's results that the fused kernel computes in its epilogue."""

from __future__ import annotations

from torch import fx

from overlap_inductor.facts.limits import MOST_EXTRAS
from overlap_inductor.lowerings.fused.parameters import EXCHANGES
from overlap_inductor.lowerings.fused.parameters import in_one_launch
from overlap_inductor.lowerings.one_op.schedule import operands
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.tile_epilogue import Tail
from overlap_inductor.sites.tile_epilogue import find_tail

GATHER = "all_gather_matmul"
"""The pattern whose op has an epilogue for each matmul. The op of a reduction has one epilogue."""


def results_of(site: OverlapSite) -> list[fx.Node]:
    """For each result of the op except the gathered tensor: the node that the result replaces."""
    if site.facts.pattern == GATHER:
        return [m.node for m in site.matmuls]
    return [nodes_of(site, ReduceNodes).result]


def tails_of(site: OverlapSite, planned: list[str] | None = None) -> list[Tail | None]:
    """The tail of each result; empty for a dynamic token count and for an all-to-all. A result has no tail (``None``)
    in these cases:

    * ``find_tail`` finds none.
    * The vendor's matmul computes the result.
    * The kernel writes the rows in another order than the result has, or writes the transposed product.
    * The last shards may have fewer rows than the others.
    * The site is a reduction, and its result is not the wait of its only collective.
    * A result of an all-gather has an empty text in ``planned``.

    ``planned``: what ``described`` returned when the site was planned.
    """
    if not isinstance(site.nodes.tokens, int) or site.facts.pattern in EXCHANGES:
        return []
    return (_gather_tails if site.facts.pattern == GATHER else _reduce_tail)(site, planned)


def described(tails: list[Tail | None]) -> list[str]:
    """The program of each tail as text, empty for a result without a tail."""
    return ["" if tail is None else str(tail.epilogue) for tail in tails]


def _reduce_tail(site: OverlapSite, planned: list[str] | None) -> list[Tail | None]:
    nodes = nodes_of(site, ReduceNodes)
    collective, sharded = nodes.collectives[0], nodes.sharded
    in_order = sharded.dim == 0 and _one_run(sharded)
    alone = len(nodes.collectives) == 1 and nodes.result is collective.wait
    if not in_order or not alone:
        return [None]
    return [find_tail(nodes.result, collective.node, planned=planned[0] if planned else None)]


def _gather_tails(site: OverlapSite, planned: list[str] | None) -> list[Tail | None]:
    nodes = nodes_of(site, GatherNodes)
    launched = in_one_launch([right for _, right in operands(site)])
    tails: list[Tail | None] = []
    room = MOST_EXTRAS
    for i, consumer in enumerate(nodes.consumers):
        fits = i in launched and consumer.role == "M" and _one_run(consumer.sharded) and (planned is None or planned[i])
        tail = (
            find_tail(consumer.matmul.node, nodes.collective.node, room, planned[i] if planned else None)
            if fits
            else None
        )
        room -= len(tail.extras) if tail is not None else 0
        tails.append(tail)
    return tails


def _one_run(sharded: ShardedDim) -> bool:
    """Whether the rows of each rank are consecutive, and all shards have the same size."""
    return isinstance(sharded.outer, int) and sharded.outer == 1 and not sharded.short

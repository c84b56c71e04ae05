# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts a site ``all-gather -> matmul``, and writes the site's steps (``form.RingForm``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import gather_cuts
from overlap_inductor.lowerings.ring import looped_gather
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_gather
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.transports import routes


class GatherRing:
    """See ``form.RingForm``. Shards travel round the ring. A rank multiplies a shard when it arrives."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        nodes = nodes_of(site, GatherNodes)
        lead = gather_cuts.leading_atom(nodes)
        cuts = lead is not None and gather_cuts.can_cut(nodes)
        parts = part_count(lead.size, sub_chunks.most(site, config)) if lead is not None and cuts else 1
        return {"sub_chunks": parts, "route": "ring" if config.ring_direction == "unidirectional" else "bidirectional"}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        nodes, ranks = nodes_of(site, GatherNodes), site.facts.collective.world_size
        consumer = nodes.consumers[index]
        crossed = gather_cuts.crossed_role(nodes, consumer)
        return {consumer.role: ranks * parts} if crossed is None else {crossed: parts, consumer.role: ranks}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, GatherNodes), site.facts.collective.world_size
        hops = routes.hop_count(route, world_size, parts)
        ahead = [n for n in nodes.between() if n not in nodes.through]
        computed = in_eights([*ahead, *nodes.epilogue.nodes])
        return 4 + hops + ((world_size - 1) * parts + 1) * (2 + sum(map(_nodes_a_piece, nodes.consumers)) + computed)

    def loopable(self, site: OverlapSite) -> bool:
        return looped_gather.forms_of(nodes_of(site, GatherNodes)) is not None

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return looped_gather.chooses_at_run_time(nodes_of(site, GatherNodes))

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, GatherNodes)
        gathered, results = unrolled_gather.rewrite(emit, nodes, parts, route)
        return emit.chain, {**results, nodes.collective.wait: gathered, nodes.collective.node: gathered}

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        return looped_gather.rewrite(emit, nodes_of(site, GatherNodes), parts, floor, route)

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """``ExchangeTerms.cut``: a list and an empty text. The list holds the size of the shard's dim that is cut into
        sub-chunks. ``None`` if a shard is not cut."""
        nodes = nodes_of(site, GatherNodes)
        if parts == 1:
            return None
        forms, lead = None if unrolled else looped_gather.forms_of(nodes), gather_cuts.leading_atom(nodes)
        if forms is not None:
            return [looped_gather.shard_shape(nodes, forms)[0]], ""
        return [] if lead is None else [lead.size], ""


def _nodes_a_piece(consumer: GatherConsumer) -> int:
    """Estimated number of nodes for one piece: the matmul and its views. If the gathered dim is contracted, more nodes
    cut the other operand, widen sums and zero the padding of short shards."""
    narrow = consumer.role == "K" and tools.dtype(consumer.matmul.node).itemsize < 4
    short = consumer.role == "K" and consumer.sharded.short
    return {"M": 2, "N": 3, "K": 4, "B": 3}[consumer.role] + (2 if narrow else 0) + (3 if short else 0)


def in_eights(nodes: Iterable[fx.Node]) -> int:
    """The number of pointwise ops among ``nodes``, rounded down to a multiple of 8. One rank may have a bias, a cast or
    padding that others lack. Because of the rounding, such a difference rarely changes which sites are unrolled."""
    return sum(tools.is_pointwise(n) and n.target not in tools.SAME for n in nodes) // 8 * 8

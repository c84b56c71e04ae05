# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts a site ``matmul -> all-to-all`` or ``all-to-all -> matmul``, and writes the site's
steps (``form.RingForm``). Each slice goes straight to the rank that receives it."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import looped_exchange
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_exchange
from overlap_inductor.lowerings.ring.gather_form import GatherRing
from overlap_inductor.lowerings.ring.gather_form import in_eights
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count


class SentRing:
    """The ring for ``matmul -> all-to-all`` (``form.RingForm``). The slices for the other ranks are computed
    first. Each piece is sent as soon as it is computed."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        parts = part_count(nodes_of(site, SentNodes).lead, sub_chunks.most(site, config))
        return {"sub_chunks": parts, "route": unrolled_exchange.ROUTE}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        nodes, ranks = nodes_of(site, SentNodes), site.facts.collective.world_size
        lead = nodes.leaves[index].output_role(0)
        return {nodes.role: ranks * parts} if nodes.sharded.dim == 0 else {lead: parts, nodes.role: ranks}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, SentNodes), site.facts.collective.world_size
        own = in_eights(n for n in nodes.layouts if n not in nodes.through and n not in nodes.externals)
        return 8 + ((world_size - 1) * parts + 1) * (4 + 3 * len(nodes.leaves) + own)

    def loopable(self, site: OverlapSite) -> bool:
        return looped_exchange.computes_sent(nodes_of(site, SentNodes))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return self.loopable(site)

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        return emit.chain, unrolled_exchange.rewrite_sent(emit, nodes_of(site, SentNodes), parts)

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        return looped_exchange.rewrite_sent(emit, nodes_of(site, SentNodes), parts, floor)

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        return nodes_of(site, SentNodes).cut()


class ReceivedRing(GatherRing):
    """The ring for ``all-to-all -> matmul`` (``form.RingForm``). This rank's own tokens are multiplied first, the
    tokens of other ranks when they arrive."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        return {**super().parameters(site, config), "route": unrolled_exchange.ROUTE}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        hops = (site.facts.collective.world_size - 1) * parts
        return 6 + 2 * hops + super().unrolled_nodes(site, parts, route)

    def loopable(self, site: OverlapSite) -> bool:
        return looped_exchange.computes_received(nodes_of(site, ReceivedNodes))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return self.loopable(site) and super().chooses_at_run_time(site)

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, ReceivedNodes)
        received, results = unrolled_exchange.rewrite_received(emit, nodes, parts)
        return emit.chain, {**results, nodes.collective.wait: received, nodes.collective.node: received}

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        return looped_exchange.rewrite_received(emit, nodes_of(site, ReceivedNodes), parts, floor)

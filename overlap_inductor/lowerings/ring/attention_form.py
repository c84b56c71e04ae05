# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts a site ``gathers of keys and values -> attention``, and writes its steps (``form.RingForm``)."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import unrolled_attention
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.attention_nodes import AttentionNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.transports import routes


class AttentionRing:
    """See ``form.RingForm``. Shards of keys and values travel round the ring. A rank attends to a shard when it
    arrives."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        return {"sub_chunks": 1, "route": "ring" if config.ring_direction == "unidirectional" else "bidirectional"}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        return {"K": site.facts.collective.world_size}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        """As ``form.RingForm``. The estimate has, for each shard, two slices with a view each, attention with two
        results, and nodes for masks and merging. The ops of the hops are added."""
        world_size, attention = site.facts.collective.world_size, nodes_of(site, AttentionNodes).attention
        hiding = 8 if attention.is_causal else 4 if attention.hides_keys else 0
        return 8 + 2 * routes.hop_count(route, world_size, parts) + world_size * (16 + hiding)

    def loopable(self, site: OverlapSite) -> bool:
        return False

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return False

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        return emit.chain, unrolled_attention.rewrite(emit, nodes_of(site, AttentionNodes), route)

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        raise RuntimeError("no looping op computes attention")

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        return None

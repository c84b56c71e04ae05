# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts sites ``lookups -> all-to-all`` and ``all-to-all -> gradients of tables``, and writes its steps
(``form.RingForm``). A *block* holds the results or gradients of one table for one rank's part of the batch. Each block
goes straight to the rank that receives it."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_tables
from overlap_inductor.lowerings.ring.unrolled_exchange import ROUTE
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.lookup_nodes import GradientNodes
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.lookup_nodes import TableNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count


def _parameters(site: OverlapSite, nodes: TableNodes, config: OverlapConfig) -> dict[str, Any]:
    """Sub-chunks are groups of tables. A group holds the rows of all ranks for these tables. In other forms, a
    sub-chunk is a part of one rank's rows. So a group is larger than such a sub-chunk. The transfer of the last group
    (for gradients, of the first group) is exposed. To keep this transfer short, there are up to
    ``4 * S`` groups."""
    return {"sub_chunks": part_count(nodes.count, 4 * sub_chunks.most(site, config)), "route": ROUTE}


class _TableRing:
    """What ``PooledRing`` and ``GradientRing`` share. The argument ``parts`` is the number of groups of tables."""

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        return {None: parts}

    def loopable(self, site: OverlapSite) -> bool:
        return False

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return False

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        raise RuntimeError("no looping op computes lookups in tables")

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        return site.nodes.cut()


class PooledRing(_TableRing):
    """See ``form.RingForm``. The results of a group of tables are sent as soon as they are looked up."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        return _parameters(site, nodes_of(site, PooledNodes), config)

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, PooledNodes), site.facts.collective.world_size
        each = 3 * world_size if nodes.by_rank else 2
        return 8 + (2 * world_size + 5) * parts + each * nodes.count

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        return emit.chain, unrolled_tables.rewrite_pooled(emit, nodes_of(site, PooledNodes), parts)


class GradientRing(_TableRing):
    """See ``form.RingForm``. The gradients of a group of tables are computed while the next group travels."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        return _parameters(site, nodes_of(site, GradientNodes), config)

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, GradientNodes), site.facts.collective.world_size
        return 8 + (2 * (world_size - 1) + 1) * parts + 4 * nodes.count

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        return emit.chain, unrolled_tables.rewrite_gradients(emit, nodes_of(site, GradientNodes), parts)

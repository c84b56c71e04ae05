# SPDX-License-Identifier: Apache-2.0
"""Plans pattern ``embedding_all_to_all`` for schedule ``fused``: lookups in tables and the all-to-all that follows. The
backward graph's all-to-all and the gradients of the tables are left to other schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.fused import table_cost
from overlap_inductor.lowerings.fused import table_parameters
from overlap_inductor.lowerings.fused import table_sites
from overlap_inductor.lowerings.one_op.schedule import OneOpSchedule
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.lookup_nodes import TableNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.transports import sm_push

PATTERN = "embedding_all_to_all"


def _is_table(site: OverlapSite) -> bool:
    return isinstance(site.nodes, TableNodes)


class TableSchedule(OneOpSchedule):
    """See ``SiteSchedule``. Writes lookups and their exchange as one op, and other sites as ``OneOpSchedule`` does.
    Does not serve lookups with a dynamic batch size."""

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        if not _is_table(site):
            return super().why_not(site, config)
        if config.transport not in ("auto", sm_push.NAME):
            return (
                f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, but schedule {self.name} can only use {sm_push.NAME}"
                f" for {PATTERN}"
            )
        if not isinstance(site.nodes, PooledNodes):
            return f"no {self.noun} computes the gradients of tables"
        device = site.nodes.collective.input.meta["val"].device
        return table_sites.why_not(site.nodes) or self.why_not_between(site.facts.collective.ranks, device)

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        if not _is_table(site):
            return super().forced(site, config)
        return [PlanPiece(self.name, sm_push.NAME, (0, None), {"settings": json.dumps({})})]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        if not _is_table(site):
            return super().seconds(site, config)
        return table_cost.seconds(sizes_at(site), machine_of(site, config))

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        if not _is_table(site):
            return super().where_it_pays(site, config, fewest)
        return self.forced(site, config) if table_cost.pays(sizes_at(site), machine_of(site, config)) else None

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        if not _is_table(site):
            return super().request(site, piece)
        return Request(site.facts.id, *table_parameters.needed(*table_sites.sizes(nodes_of(site, PooledNodes))))

    def anchor(self, site: OverlapSite) -> fx.Node | None:
        """The node before which a site of tables is written: the all-to-all, because all tables and indices come
        before it in the graph."""
        return nodes_of(site, PooledNodes).collective.node if _is_table(site) else super().anchor(site)

    def exchange(self, site: OverlapSite, piece: PlanPiece) -> ExchangeTerms:
        if not _is_table(site):
            return super().exchange(site, piece)
        return ExchangeTerms(piece.parameters, site.nodes.cut(), False)

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        if not _is_table(site):
            return super().rewrite(emit, site, parameters)
        return table_sites.rewrite(emit, nodes_of(site, PooledNodes), parameters["settings"])

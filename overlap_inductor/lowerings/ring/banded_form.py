# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts a site ``matmul -> row-wise ops -> all-to-all``, and writes its steps (``form.RingForm``). The
steps, one for each band of tokens, are always unrolled."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_banded
from overlap_inductor.lowerings.ring.gather_form import in_eights
from overlap_inductor.lowerings.ring.unrolled_exchange import ROUTE
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.banded_nodes import BandedNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count


class BandedRing:
    """See ``form.RingForm``."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        parts = part_count(nodes_of(site, BandedNodes).lead, sub_chunks.most(site, config))
        return {"sub_chunks": parts, "route": ROUTE}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        return {"M": parts}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, peers = nodes_of(site, BandedNodes), site.facts.collective.world_size - 1
        return 8 + parts * (8 + 2 * peers + 2 * in_eights(nodes.row_wise))

    def loopable(self, site: OverlapSite) -> bool:
        return False

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return False

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        return emit.chain, unrolled_banded.rewrite(emit, nodes_of(site, BandedNodes), parts)

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        raise RuntimeError(
            f"site {site.facts.id}: bands of tokens were planned as a looping op; expected unrolled steps"
        )

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        return nodes_of(site, BandedNodes).cut()

# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts a site of a seam (``passes.sequence.seams``) into bands, and writes the site's steps into the
graph."""

from __future__ import annotations

from torch import fx

from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.ring import unrolled_bands
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter


def rewrite(emit: StepEmitter, site: OverlapSite, bands: int) -> tuple[fx.Node, Replaced]:
    """Write the site as unrolled steps, cut into ``bands`` bands. Returns what ``SiteSchedule.rewrite`` returns."""
    if isinstance(site.nodes, ReduceNodes):
        return emit.chain, reduced_rows.reduced(site.nodes, unrolled_bands.rewrite_scatter(emit, site.nodes, bands))
    nodes = nodes_of(site, GatherNodes)
    gathered, results = unrolled_bands.rewrite_gather(emit, nodes, bands)
    return emit.chain, {**results, nodes.collective.wait: gathered, nodes.collective.node: gathered}

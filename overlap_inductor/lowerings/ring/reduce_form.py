# SPDX-License-Identifier: Apache-2.0
"""How the ring cuts matmuls whose result is scattered, reduced or gathered, and writes its steps
(``form.RingForm``)."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.ring import grouped_rows
from overlap_inductor.lowerings.ring import looped_grouped
from overlap_inductor.lowerings.ring import looped_reduce
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_reduce
from overlap_inductor.lowerings.ring.gather_form import in_eights
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count


class ReduceRing:
    """See ``form.RingForm``. Routes:

    - ``owner``: partial sums go to their owner as soon as they are computed. For an all-reduce, the owners then
      broadcast the sums.
    - ``travel``: an accumulator visits all ranks (unrolled steps only).
    - ``broadcast``: pieces go to all other ranks.
    """

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        nodes, most = nodes_of(site, ReduceNodes), sub_chunks.most(site, config)
        if site.facts.pattern == "matmul_all_gather":
            return {"sub_chunks": part_count(nodes.padded_shape[0], most), "route": "broadcast"}
        travels = config.numerics == "allow_hop_rounding" and site.facts.pattern == "matmul_reduce_scatter"
        parts = part_count(nodes.sharded.chunk, most)
        found: dict[str, Any] = {"sub_chunks": parts, "route": "travel" if travels else "owner"}
        if not isinstance(nodes.tokens, int) and looped_grouped.computes(site.facts.pattern, nodes):
            # If a plan has ``min_rows``, ``fit_budget`` takes the looping op. Unrolled steps would add guards, because
            # Inductor compares the steps' sizes before it fuses the steps.
            found["min_rows"] = 0
        return found

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        ranks = 1 if site.facts.pattern == "matmul_all_gather" else site.facts.collective.world_size
        return {site.facts.matmuls[index].role: ranks * parts}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, ReduceNodes), site.facts.collective.world_size
        own = (n for n in nodes.layouts if n not in nodes.through and n not in nodes.externals)
        region = len(nodes.leaves) + in_eights(own) + sum(_grouped_nodes(m) for m in nodes.leaves)
        if site.facts.pattern == "matmul_all_gather":
            return 4 + parts * (2 + region)
        region += len(nodes.leaves) - 1
        legs = 2 if site.facts.collective.kind == "all_reduce" else 1
        return 8 + world_size * parts * (3 + 2 * region) + legs * parts * 6

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReduceNodes)
        return looped_grouped.computes(site.facts.pattern, nodes) or looped_reduce.computes(site.facts.pattern, nodes)

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        nodes, pattern = nodes_of(site, ReduceNodes), site.facts.pattern
        return looped_grouped.computes(pattern, nodes) or looped_reduce.chooses_at_run_time(pattern, nodes)

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, ReduceNodes)
        if site.facts.pattern == "matmul_reduce_scatter":
            result = unrolled_reduce.rewrite_reduce_scatter(emit, nodes, parts, route)
        elif site.facts.pattern == "matmul_all_reduce":
            result = unrolled_reduce.rewrite_all_reduce(emit, nodes, parts)
        else:
            result = unrolled_reduce.rewrite_gathered_output(emit, nodes, parts)
        return emit.chain, reduced_rows.reduced(nodes, result)

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, ReduceNodes)
        loop = looped_grouped if looped_grouped.computes(site.facts.pattern, nodes) else looped_reduce
        return loop.rewrite(emit, site.facts.pattern, nodes, parts, floor)

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """Returns ``(sizes, words)``, as ``SiteNodes.cut``. The words are text that ranks compare. A looping op
        needs the rows in the order of the ranks that get their sums: first rank 0's, then rank 1's, and so
        on. If the op's rows must be brought into this order, the words end with ``" rows in front"``."""
        nodes = nodes_of(site, ReduceNodes)
        sizes, words = nodes.cut()
        outer = nodes.sharded.outer
        already_in_front = isinstance(outer, int) and outer == 1 and nodes.sharded.dim == 0
        if unrolled or already_in_front or site.facts.pattern == "matmul_all_gather":
            return sizes, words
        return sizes, f"{words} rows in front"


def _grouped_nodes(matmul: MatmulNode) -> int:
    """Estimated number of nodes for one piece of a grouped matmul, without the matmul itself; 0 for other matmuls."""
    return grouped_rows.NODES + len(matmul.inner) if matmul.inner else 0

# SPDX-License-Identifier: Apache-2.0
"""Add guards to a graph with a dynamic number of tokens. Counts at which the host is the limit (``passes.host_time``)
then get a graph of their own, which stays as written.

If one graph served all counts, its overlap ops would run the plain collectives at these counts. The host would need
longer to launch these ops. Two layers of Llama-70B on 4 H200s, compiled with ``dynamic=True``, were 0.89 times as fast
as plain with 1000 tokens, and 0.92 times with 256.

Contract: ``graph`` is a joint graph or an inference graph, before the partitioner. The pass adds guards and changes
nothing else. It does not communicate. Ranks with equal graphs and settings add equal guards. Pseudo-code::

    for forward and backward, if the host is the limit below N tokens:
        if a site would be overlapped if the host were never the limit:
            guard: tokens >= N, or tokens < N, by the example's tokens
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.passes import check as legality
from overlap_inductor.passes import host_time
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.torch_compat.guards import decide

log = logging.getLogger("overlap_inductor")


def guard_counts(graph: fx.Graph, config: OverlapConfig, refusal: str | None) -> None:
    """Add the guards. ``refusal``: why this compile cannot hold overlap ops, or ``None``. Raises no error: if the pass
    fails, one graph serves all counts."""
    if config.schedule != "auto" or config.mode == "report" or refusal is not None:
        return
    try:
        if _has_dynamic(graph):
            _add_guards(graph, config)
    except Exception:  # noqa: BLE001  (a model that compiles without the pass must compile with it)
        log.warning("overlap_inductor: adding guards for token counts failed. %s", BUG_REPORT, exc_info=True)


def _add_guards(graph: fx.Graph, config: OverlapConfig) -> None:
    found = SiteFinder(graph, "forward").run()
    limits = host_time.limits(found, config)
    context = legality.Context(config)
    for site in found.sites:
        limit = limits.get(site.collectives[0].node)
        if limit is None or limit.size is None or limit.count is None or limit.fewest(limit.size) in (0, None):
            continue  # no limit, or a guard says already on which side of it the graph is
        if legality.refuse(site, context) is None and planner.plan(site, config).status == "overlapped":
            decide(limit.size >= limit.count)


def _has_dynamic(graph: fx.Graph) -> bool:
    inputs = (node.args[0] for node, _, _ in find_collectives(graph))
    return any(isinstance(s, torch.SymInt) for n in inputs if tools.is_tensor(n) for s in tools.shape(n))

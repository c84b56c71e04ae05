# SPDX-License-Identifier: Apache-2.0
"""The largest number of sub-chunks into which the ring cuts a shard (switch ``sub_chunks``)."""

from __future__ import annotations

from overlap_inductor.config import OverlapConfig
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.torch_compat.target import on_gpu

AUTO = 4
CPU_PIECES = 4
"""On a CPU, the shards of all ranks together have about this many pieces if schedule ``ring`` is forced, unless
``by_estimate`` holds. More pieces add nodes that Inductor must compile. For two and four layers of Llama over gloo, on
2 and 4 ranks, they saved no time (``bench/results/layers_pieces.jsonl``)."""
MEASURED = ("all_gather_matmul", "matmul_reduce_scatter")


def by_estimate(site: OverlapSite, config: OverlapConfig) -> bool:
    """Whether estimates choose the site's sub-chunks and bands: with schedule ``auto``, and on a CPU also for a forced
    ring if the switch ``machine`` states figures. Without these figures, a forced ring trusts no estimate. A number of
    sub-chunks that is set for a forced ring is taken as it is."""
    if config.schedule == "auto":
        return True
    on_cpu = not on_gpu(tools.value(site.collectives[0].input).device)
    return config.machine is not None and config.sub_chunks == "auto" and on_cpu and has_example(site)


def most(site: OverlapSite, config: OverlapConfig) -> int:
    """The switch's number. If the switch is ``auto``: ``AUTO``, or fewer for the patterns ``MEASURED`` on a CPU, unless
    ``by_estimate`` holds. Then an estimate chooses among up to ``AUTO`` sub-chunks."""
    if isinstance(config.sub_chunks, int):
        return config.sub_chunks
    measured = site.facts.pattern in MEASURED and not on_gpu(tools.value(site.collectives[0].input).device)
    if not measured or by_estimate(site, config):
        return AUTO
    return -(-CPU_PIECES // site.facts.collective.world_size)

# SPDX-License-Identifier: Apache-2.0
"""The largest number of sub-chunks into which the ring cuts a shard (switch ``sub_chunks``)."""

from __future__ import annotations

from overlap_inductor.config import OverlapConfig
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat.target import on_gpu

AUTO = 4
CPU_PIECES = 4
"""On a CPU, the shards of all ranks together have about this many pieces if schedule ``ring`` is forced. More pieces
add nodes that Inductor must compile. For two and four layers of Llama over gloo, on 2 and 4 ranks, they saved no time
(``bench/results/layers_pieces.jsonl``)."""
MEASURED = ("all_gather_matmul", "matmul_reduce_scatter")


def most(site: OverlapSite, config: OverlapConfig) -> int:
    """The switch's number. If the switch is ``auto``: ``AUTO``, or fewer for the patterns ``MEASURED`` on a CPU if the
    schedule is forced. Schedule ``auto`` chooses among up to ``AUTO`` sub-chunks by its estimate."""
    if isinstance(config.sub_chunks, int):
        return config.sub_chunks
    collective, forced = site.collectives[0], config.schedule != "auto"
    if not forced or site.facts.pattern not in MEASURED or on_gpu(tools.value(collective.input).device):
        return AUTO
    return -(-CPU_PIECES // site.facts.collective.world_size)

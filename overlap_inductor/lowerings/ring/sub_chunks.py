# SPDX-License-Identifier: Apache-2.0
"""The largest number of sub-chunks into which the ring cuts a shard (switch ``sub_chunks``)."""

from __future__ import annotations

from overlap_inductor.config import OverlapConfig
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat.target import on_gpu

AUTO = 4
CPU_PIECES = 4
"""The number of pieces of all ranks' shards together, on a CPU. More pieces add nodes that Inductor must compile, and
saved no time: two and four layers of Llama over gloo, on 2 and 4 ranks (``bench/results/layers_pieces.jsonl``)."""
IN_PIECES = ("all_gather_matmul", "matmul_reduce_scatter")
"""Patterns whose shards are multiplied one after the other, so that W ranks already make W pieces."""


def most(site: OverlapSite, config: OverlapConfig) -> int:
    """The largest number of sub-chunks of a shard: the switch's number. For ``auto``, see ``OverlapConfig``."""
    if isinstance(config.sub_chunks, int):
        return config.sub_chunks
    collective = site.collectives[0]
    if site.facts.pattern not in IN_PIECES or on_gpu(tools.value(collective.input).device):
        return AUTO
    return max(1, CPU_PIECES // site.facts.collective.world_size)

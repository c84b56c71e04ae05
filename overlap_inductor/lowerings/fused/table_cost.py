# SPDX-License-Identifier: Apache-2.0
"""Estimates of the fused lookup kernel, with the constants of other fused kernels.

On 2 H100s (bench/results/lookups.jsonl), 64 tables with bags of 1 to 20 indices took 1.04 to 1.09 times the estimate.
Bags of 100 indices took 0.7 times the estimate. On 4 H200s, bags of 1, 10 and 100 took 0.8, 0.75 and 0.5 times it.
"""

from __future__ import annotations

from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.fused.cost import COST

EXPOSED = COST.exposed[1]
"""Exposed fraction of the shorter of lookups and transfer. It was measured for the fused reduce-scatter
(bench/results/fused.jsonl). Like the reduce-scatter, the lookup kernel computes the other ranks' slices first, and
stores them into the peers' memory."""
RANKS = 4
"""The largest measured group."""


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of one kernel, the sum of:

    - the longer of lookups and transfer
    - an exposed fraction of the shorter one
    - the copy of the received results: it reads, and writes, as many bytes as this rank sends
    - a fixed cost

    ``sizes.memory`` is the number of bytes that the lookups read and write.
    """
    lookups, wire = sizes.memory / machine.memory_bytes, sizes.bytes_sent / machine.link_bytes
    copy = 2 * sizes.bytes_sent / machine.memory_bytes
    fixed = COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds
    return max(lookups, wire) + EXPOSED * min(lookups, wire) + copy + fixed


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether the kernel is estimated to be more than 5 % faster than ``keep`` (25 % in groups larger than those
    measured)."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine) * (MARGIN if sizes.world_size <= RANKS else MARGIN_UNMEASURED) < keep

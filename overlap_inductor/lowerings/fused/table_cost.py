# SPDX-License-Identifier: Apache-2.0
"""Estimates of the fused lookup kernel. It was not measured on GPUs: the constants are those of other fused kernels,
and a group of any size counts as unmeasured."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.fused.cost import COST

EXPOSED = COST.exposed[1]
"""Exposed fraction of the shorter of lookups and transfer. It is that of the fused matmul and reduce-scatter
(bench/results/fused.jsonl). That kernel also computes the other ranks' slices first and stores them from its blocks."""


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of one kernel. They sum the longer of lookups and transfer, an exposed fraction of the shorter, a copy
    and a fixed cost. The copy takes what the peers have sent out of the workspace. It reads and writes as many bytes as
    this rank sends.

    The lookups are limited by memory: ``sizes.memory`` is what they read and write. The rate ``memory_bytes`` was
    measured with contiguous reads; ``keep`` is estimated with the same rate.
    """
    lookups, wire = matmul_seconds(sizes, machine), sizes.bytes_sent / machine.link_bytes
    copy = 2 * sizes.bytes_sent / machine.memory_bytes
    fixed = COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds
    return max(lookups, wire) + EXPOSED * min(lookups, wire) + copy + fixed


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether the kernel is estimated to be at least 25 % faster than ``keep``."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine) * MARGIN_UNMEASURED < keep

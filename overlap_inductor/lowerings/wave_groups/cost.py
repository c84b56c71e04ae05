# SPDX-License-Identifier: Apache-2.0
"""Estimates of schedule ``wave_groups``. ``COSTS`` was measured on 2 H200s without peer access
(bench/results/operators_without_peers.jsonl). The defaults of ``WaveCost`` were not measured."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import margin_of
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import WITHOUT_PEERS
from overlap_inductor.facts.machine import Machine


@dataclass(frozen=True)
class WaveCost:
    """Constants of groups of waves.

    Attributes:
        efficiency: the speed of a matmul or collective while both run, relative to its speed when it runs alone.
        groups: the number of groups of waves into which a matmul is assumed to be cut.
        ranks: ranks of the largest process group measured; 0: none.
    """

    efficiency: float = 0.85
    groups: int = 4
    ranks: int = 0


COSTS = {WITHOUT_PEERS: WaveCost(efficiency=0.95, ranks=2)}
"""By the machine's name. Other machines have the defaults of ``WaveCost``."""


def cost_on(machine: Machine) -> WaveCost:
    return COSTS.get(machine.name, WaveCost())


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of a matmul with a collective for each group of its waves. The first group runs before any collective.
    The last collective runs after the matmul."""
    cost = cost_on(machine)
    matmul = matmul_seconds(sizes, machine) / cost.efficiency
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes / cost.efficiency
    groups = cost.groups
    return max(matmul + wire / groups, matmul / groups + wire) + groups * machine.collective_seconds


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether groups of waves are estimated to be more than 5 % faster than ``keep``: 1 % in a rewritten stretch, and
    25 % in process groups larger than those measured. A matmul of fewer than ``machine.least_tiles`` tiles never
    pays."""
    if sizes.tiles < machine.least_tiles:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    margin = margin_of(sizes, sizes.world_size <= cost_on(machine).ranks)
    return seconds(sizes, machine) * margin < keep

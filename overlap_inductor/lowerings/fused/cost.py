# SPDX-License-Identifier: Apache-2.0
"""Estimates the seconds of schedule ``fused``, with constants measured on 2, 4 and 8 H200s
(bench/results/operators.jsonl, fused.jsonl)."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import copy_seconds
from overlap_inductor.facts.cost_model import kind_of
from overlap_inductor.facts.cost_model import margin_of
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.cost_model import receive_seconds
from overlap_inductor.facts.machine import Machine


@dataclass(frozen=True)
class FusedCost:
    """Constants of a fused kernel.

    Attributes:
        exposed: exposed fraction of the shorter of matmul and transfer, by kind of site (``cost_model.kind_of``):
            all-gather; reduce-scatter or all-to-all; all-reduce; all-reduce whose transfer takes longer than its
            matmul. The last one is from predictions for larger groups (``bench.mirrored``).
        leg_seconds / leg_peer_seconds: fixed cost of a leg, and of each peer of a leg.
        ranks / exchange_ranks: largest group measured, and largest group measured with all-to-alls of rows.
    """

    exposed: tuple[float, float, float, float] = (0.05, 0.12, 0.16, 0.15)
    leg_seconds: float = 15e-6
    leg_peer_seconds: float = 8e-6
    ranks: int = 8
    exchange_ranks: int = 4


COST = FusedCost()


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of one fused kernel, the sum of:

    - the longer of matmul and transfers
    - an exposed fraction of the shorter one
    - the copy of the gathered tensor, if other nodes than the matmuls read that tensor
    - the copy of what an all-to-all after the matmul delivers
    - a fixed cost for each leg
    """
    matmul = matmul_seconds(sizes, machine)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    exposed = COST.exposed[kind_of(sizes, matmul, wire)] * min(matmul, wire) + copy_seconds(sizes, machine)
    exposed += receive_seconds(sizes, machine)
    return (
        max(matmul, wire) + exposed + sizes.legs * (COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds)
    )


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether a fused kernel is estimated to be more than 5 % faster than ``keep``. The margin is 1 % in a rewritten
    stretch, and 25 % in groups larger than those measured, and for matmuls that contract the dim that an all-to-all
    exchanges.

    With fewer than ``least_tiles`` tiles it never pays: most SMs would wait for rows.
    """
    if sizes.tiles < machine.least_tiles:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    measured = sizes.world_size <= (COST.exchange_ranks if sizes.exchanges else COST.ranks)
    margin = margin_of(sizes, measured and not sizes.contracted)
    return seconds(sizes, machine) * margin < keep

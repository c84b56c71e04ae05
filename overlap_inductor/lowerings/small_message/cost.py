# SPDX-License-Identifier: Apache-2.0
"""Estimates of schedule ``small_message``. In CUDA graphs on 2 H200s, all-reduces of 1 to 128 rows of 8192 elements
took 4 to 11 us (bench/results/small_message.jsonl)."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import Machine


@dataclass(frozen=True)
class SmallMessageCost:
    """Constants of a small all-reduce.

    Attributes:
        push_bytes: bytes per second that SMs store to peers, in each direction.
        seconds: fixed cost of an all-reduce of one leg.
        leg_seconds: fixed cost of a second leg.
    """

    push_bytes: float = 3e11
    seconds: float = 8e-6
    leg_seconds: float = 2e-6


COST = SmallMessageCost()


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of the matmul and of the all-reduce after it. The all-reduce is one-shot or two-shot
    (``kernels.small_message``), whichever is faster."""
    one_shot = sizes.bytes_sent * sizes.world_size / COST.push_bytes
    two_shot = 2 * sizes.bytes_sent / COST.push_bytes + COST.leg_seconds
    return matmul_seconds(sizes, machine) + COST.seconds + min(one_shot, two_shot)


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether schedule ``small_message`` is estimated to be more than 5 % faster than ``keep``."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine) * MARGIN < keep

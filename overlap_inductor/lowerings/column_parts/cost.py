# SPDX-License-Identifier: Apache-2.0
"""Estimate the seconds of an expert layer whose all-reduce runs under parts of the columns."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.machine import Machine


@dataclass(frozen=True)
class PartSizes:
    """What is cut into parts: ``flops`` of the last grouped matmul, ``memory`` bytes that the sum of each token's rows
    reads and writes, and ``result`` bytes of the all-reduce's result, which joins the parts."""

    flops: float
    memory: float
    result: float


def seconds(sizes: SiteSizes, own: PartSizes, machine: Machine, parts: int) -> float:
    """The seconds as written, without what ``parts`` parts hide, and with what they cost:

    - While a part is computed, the reduction of the part before it is hidden. One part's reduction stays exposed, or
      one part's computation, whichever is shorter.
    - The collective's kernels slow the computation down (``Machine.overlapped_efficiency``).
    - Each further part has a fixed cost: ``Machine.step_seconds``.
    - The parts are copied into one tensor. (If a pointwise op reads the result, Inductor makes no copy.)
    """
    rate = machine.matmul_flops.get(sizes.itemsize, min(machine.matmul_flops.values()))
    computed = own.flops / rate + own.memory / machine.memory_bytes
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    hidden = machine.overlapped_efficiency * min(computed, wire) * (parts - 1) / parts
    cost = (parts - 1) * machine.step_seconds + 2 * own.result / machine.memory_bytes
    return written_seconds(sizes, machine) + collective_seconds(sizes, machine) - hidden + cost

# SPDX-License-Identifier: Apache-2.0
"""Estimate the seconds of a ring, and whether it is faster than the plain collective and matmul."""

from __future__ import annotations

from collections.abc import Mapping

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import margin_of
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.machine import Machine

TOLERANCE = 1.05
"""A ring may take this many times the fastest ring's time if it has fewer sub-chunks. Each sub-chunk adds nodes that
Inductor must compile."""


def seconds(sizes: SiteSizes, machine: Machine, parts: int) -> float:
    """Estimated seconds of a ring that cuts each shard into ``parts`` sub-chunks: the sum of

    - the longer of matmul and transfer;
    - one piece of the shorter of them, which stays exposed;
    - a fixed cost for each step.

    The matmul's time includes the repeated reads of its pieces (``SiteSizes.repeated``). Each piece of a grouped matmul
    reads the experts' weights again, and the matmul takes at least the time of these reads.
    """
    read = sizes.world_size * parts * sizes.weights / machine.memory_bytes
    again = ((sizes.world_size - 1) * parts) * again_seconds(sizes, machine)
    matmul = max((matmul_seconds(sizes, machine) + again) / machine.overlapped_efficiency, read)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    steps = sizes.legs * (sizes.world_size - 1) * parts
    exposed = min(matmul, wire) / (sizes.world_size * parts)
    return max(matmul, wire) + exposed + steps * machine.step_seconds


def again_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Extra seconds of each piece after the first."""
    return sizes.repeated / machine.packing_bytes


def pays(sizes: SiteSizes, machine: Machine, parts: int, measured: bool = True) -> bool:
    """Whether two estimates hold: the ring is faster than ``keep`` by the factor ``margin_of(sizes, measured)``, and
    hides at least what its steps cost.

    The second condition protects the host, which launches every step, from rings of tiny collectives.
    """
    matmul, wire = matmul_seconds(sizes, machine), sizes.legs * sizes.bytes_sent / machine.link_bytes
    if min(matmul, wire) < sizes.legs * (sizes.world_size - 1) * parts * machine.step_seconds:
        return False
    keep = written_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine, parts) * margin_of(sizes, measured) < keep


def fewest_parts(sizes: SiteSizes, machine: Machine, limit: int, forced: bool = False) -> int:
    """The smallest of ``halved(limit)`` with which the ring pays and is about as fast as possible (``TOLERANCE``). If
    the ring does not pay with ``limit``, returns ``limit``. A ``forced`` ring need not pay."""
    if not forced and not pays(sizes, machine, limit):
        return limit
    return fewest({n: seconds(sizes, machine, n) for n in halved(limit) if forced or pays(sizes, machine, n)})


def halved(limit: int) -> list[int]:
    """``limit``, ``limit // 2``, ``limit // 4`` ... 1."""
    return [limit >> halvings for halvings in range(limit.bit_length())]


def fewest(estimates: Mapping[int, float]) -> int:
    """The smallest key whose estimate is close to the smallest estimate (``TOLERANCE``). An estimate may be
    negative: from the estimate of a seam, the steps that bands save are subtracted."""
    least = min(estimates.values())
    return min(n for n, estimate in estimates.items() if estimate - least <= (TOLERANCE - 1) * abs(least))

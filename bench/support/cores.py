# SPDX-License-Identifier: Apache-2.0
"""Gives each rank of a CPU benchmark a physical core of its own, if there are enough cores. Two ranks on one core would
slow each other down."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(allowed: Sequence[int], topology: Path = TOPOLOGY) -> list[list[int]]:
    """The CPUs of ``allowed``, grouped by physical core. A CPU whose siblings are not known is a core of its own."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        path = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(path.read_text().strip() if path.is_file() else str(cpu), []).append(cpu)
    return list(cores.values())


def own_core(rank: int, ranks: int, cores: Sequence[Sequence[int]]) -> int:
    """The CPU for ``rank``. If there are at least ``ranks`` physical cores, each rank has a core of its own, and these
    cores are equally far apart in ``cores``. With fewer cores, ranks share cores.

    Args:
        cores: what ``physical_cores`` returns.
    """
    step = max(1, len(cores) // ranks)
    return cores[rank * step % len(cores)][0]


def allowed_cores() -> list[list[int]]:
    """The physical cores on which this process may run."""
    return physical_cores(sorted(os.sched_getaffinity(0)))


__all__ = ["allowed_cores", "own_core", "physical_cores"]

"""What every schedule's estimate rests on: the sizes of a site, and the seconds of its matmul and of its collective
alone.

``serial = T_matmul + T_collective``. A schedule hides one behind the other except for a part of its own, and pays a
fixed cost (CommFuse 1.3 and XLA's windowed-einsum gate have the same form); see ``cost.py`` of each schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.machine import Machine

MARGIN = 1.05
"""How much faster than ``keep`` a schedule must be estimated."""
MARGIN_UNMEASURED = 1.25
"""The same in groups larger than those that were measured."""


@dataclass(frozen=True)
class SiteSizes:
    """Numbers of one site at one token count: FLOPs of its matmuls, bytes a rank sends a leg, item size, legs (2 for an
    all-reduce), the 128 x 256 tiles of its matmuls, whether it is a gather that comes before them, whether its launches
    become one (``runtime.replay``), and bytes of the gathered tensor where others read it, too, which an op copies out
    of its workspace."""

    flops: float
    bytes_sent: float
    itemsize: int
    world_size: int
    legs: int = 1
    tiles: int = 0
    gathers: bool = False
    replays: bool = False
    handed_out: float = 0.0


def matmul_seconds(sizes: SiteSizes, machine: Machine) -> float:
    return sizes.flops / machine.matmul_flops.get(sizes.itemsize, min(machine.matmul_flops.values()))


def collective_seconds(sizes: SiteSizes, machine: Machine) -> float:
    return machine.collective_seconds + sizes.legs * sizes.bytes_sent / machine.link_bytes


def kind_of(sizes: SiteSizes, matmul: float, wire: float) -> int:
    """0: a gather; 1: a scatter; 2: an all-reduce; 3: one whose wire takes longer than its matmul."""
    return 0 if sizes.gathers else sizes.legs + (sizes.legs > 1 and wire > matmul)


def copy_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds to read the gathered tensor from the workspace and write it where others read it."""
    return 2 * sizes.handed_out / machine.memory_bytes

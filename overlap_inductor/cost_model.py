"""The analytic gate of schedule ``auto``: is a ring or a fused kernel worth it for a site of these sizes?

``serial = T_matmul + T_collective``; the ring hides one behind the other except for its first piece, pays a fixed cost a step, and its
chunk matmuls run at a lower rate (CommFuse 1.3 and XLA's windowed-einsum gate have the same form).
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.machine import Machine

_MARGIN = 1.05


@dataclass(frozen=True)
class SiteSizes:
    """Numbers of one site at one token count: FLOPs of its matmuls, bytes a rank sends, item size, legs (2 for an all-reduce)."""

    flops: float
    bytes_sent: float
    itemsize: int
    world_size: int
    legs: int = 1


def matmul_seconds(sizes: SiteSizes, machine: Machine) -> float:
    return sizes.flops / machine.matmul_flops.get(sizes.itemsize, min(machine.matmul_flops.values()))


def collective_seconds(sizes: SiteSizes, machine: Machine) -> float:
    return sizes.legs * (machine.collective_seconds + sizes.bytes_sent / machine.link_bytes)


def ring_seconds(sizes: SiteSizes, machine: Machine, parts: int) -> float:
    """Seconds of a ring with ``parts`` sub-chunks a shard."""
    matmul = matmul_seconds(sizes, machine) / machine.overlapped_efficiency
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    steps = sizes.legs * (sizes.world_size - 1) * parts
    exposed = min(matmul, wire) / (sizes.world_size * parts)
    return max(matmul, wire) + exposed + steps * machine.step_seconds


def fused_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of one fused kernel: the longer of matmul and wire, what of the collective stays in sight, and a fixed cost."""
    matmul = matmul_seconds(sizes, machine) / machine.fused_efficiency
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    return max(matmul, wire) + machine.fused_exposed[sizes.legs - 1] * min(matmul, wire) + machine.fused_seconds


def fused_pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether a fused kernel is estimated to be at least 5 % faster than ``keep``."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return fused_seconds(sizes, machine) * _MARGIN < keep


def estimates_us(sizes: SiteSizes, machine: Machine, parts: int, fused: bool = False) -> dict[str, float]:
    """Microseconds of ``keep`` and ``ring``, of the matmul and the collective alone, and of a ``fused`` kernel where there is one."""
    matmul, collective = matmul_seconds(sizes, machine), collective_seconds(sizes, machine)
    values = {"keep": matmul + collective, "ring": ring_seconds(sizes, machine, parts), "matmul": matmul, "collective": collective}
    if fused:
        values["fused"] = fused_seconds(sizes, machine)
    return {name: round(value * 1e6, 1) for name, value in values.items()}


def ring_pays(sizes: SiteSizes, machine: Machine, parts: int) -> bool:
    """Whether the ring is estimated to be at least 5 % faster than ``keep``."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return ring_seconds(sizes, machine, parts) * _MARGIN < keep

"""The analytic gate of schedule ``auto``: which schedule is worth it for a site of these sizes?

``serial = T_matmul + T_collective``; the ring hides one behind the other except for its first piece, pays a fixed cost a step, and its
chunk matmuls run at a lower rate (CommFuse 1.3 and XLA's windowed-einsum gate have the same form).
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.machine import Machine

_MARGIN = 1.05
_MARGIN_UNMEASURED = 1.25


@dataclass(frozen=True)
class SiteSizes:
    """Numbers of one site at one token count: FLOPs of its matmuls, bytes a rank sends a leg, item size, legs (2 for an all-reduce), the 128 x 256
    tiles of its matmuls, whether it is a gather that comes before them, whether its launches become one (``transports.replay``), and bytes of the gathered tensor where others
    read it, too, which an op copies out of its workspace."""

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


def ring_seconds(sizes: SiteSizes, machine: Machine, parts: int) -> float:
    """Seconds of a ring with ``parts`` sub-chunks a shard."""
    matmul = matmul_seconds(sizes, machine) / machine.overlapped_efficiency
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    steps = sizes.legs * (sizes.world_size - 1) * parts
    exposed = min(matmul, wire) / (sizes.world_size * parts)
    return max(matmul, wire) + exposed + steps * machine.step_seconds


def _kind(sizes: SiteSizes, matmul: float, wire: float) -> int:
    """0: a gather; 1: a scatter; 2: an all-reduce; 3: one whose wire takes longer than its matmul."""
    return 0 if sizes.gathers else sizes.legs + (sizes.legs > 1 and wire > matmul)


def _copy_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds to read the gathered tensor from the workspace and write it where others read it."""
    return 2 * sizes.handed_out / machine.memory_bytes


def _copy_beside_seconds(sizes: SiteSizes, machine: Machine, matmul: float) -> float:
    """The same in sight of chunks, which copy beside the last chunk's matmul (of a quarter of all rows, or of a shard): what that does not hide, and what it is slowed down."""
    copy = _copy_seconds(sizes, machine)
    return max(machine.chunked_copy_exposed * copy, copy - matmul / max(4, sizes.world_size))


def fused_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of one fused kernel: the longer of matmul and wire, and for each leg a fixed cost and the part of its wire that stays in sight."""
    matmul = matmul_seconds(sizes, machine)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    exposed = machine.fused_exposed[_kind(sizes, matmul, wire)] * min(matmul, wire) + _copy_seconds(sizes, machine)
    return max(matmul, wire) + exposed + sizes.legs * (machine.fused_leg_seconds + (sizes.world_size - 1) * machine.fused_leg_peer_seconds)


def fused_pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether a fused kernel is estimated to be at least 5 % faster than ``keep``: 25 % in groups larger than those that were measured.

    Never with less than a wave and a half of tiles, where most of the GPU would wait for what is coming.
    """
    if sizes.tiles < machine.fused_tiles:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    margin = _MARGIN if sizes.world_size <= machine.fused_ranks else _MARGIN_UNMEASURED
    return fused_seconds(sizes, machine) * margin < keep


def chunked_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of vendor matmuls on chunks beside transfers: the longer of both, a part of the shorter, and a fixed cost a leg."""
    matmul = matmul_seconds(sizes, machine)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    exposed = machine.chunked_exposed[_kind(sizes, matmul, wire)] * min(matmul, wire) + _copy_beside_seconds(sizes, machine, matmul)
    return max(matmul, wire) + exposed + sizes.legs * (machine.chunked_leg_seconds + (sizes.world_size - 1) * machine.chunked_leg_peer_seconds)


def chunked_pays(sizes: SiteSizes, machine: Machine) -> bool:
    """As ``fused_pays``; and a call takes the GPU no less time than the host, which would be what a model without CUDA graphs waits for, and gains more than the host, or
    peers that are late, may lose. Where its launches are one, fewer tiles and a smaller gain are enough."""
    peers, seconds = sizes.world_size - 1, chunked_seconds(sizes, machine)
    if sizes.replays:
        tiles, host = min(machine.fused_tiles, machine.chunked_replay_tiles * sizes.world_size), machine.chunked_replay_seconds
        gain = sizes.legs * max(machine.chunked_replay_gain_seconds, machine.chunked_replay_gain_peer_seconds * peers)
    else:
        tiles, host = machine.fused_tiles, machine.chunked_host_seconds + sizes.legs * peers * machine.chunked_peer_seconds
        gain = machine.chunked_gain_seconds
    if sizes.tiles < tiles or seconds < host:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    margin = _MARGIN if sizes.world_size <= machine.chunked_ranks else _MARGIN_UNMEASURED
    return max(seconds * margin, seconds + gain) < keep


def small_message_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of the matmul and, behind it, a small all-reduce: in one shot (every shard to every peer) or in two, whichever sends for less time."""
    one_shot = sizes.bytes_sent * sizes.world_size / machine.push_bytes
    two_shot = 2 * sizes.bytes_sent / machine.push_bytes + machine.push_leg_seconds
    return matmul_seconds(sizes, machine) + machine.push_seconds + min(one_shot, two_shot)


def small_message_pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether that is estimated to be at least 5 % faster than ``keep``, on a machine whose GPUs reach each other's memory."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return small_message_seconds(sizes, machine) * _MARGIN < keep


def wave_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of a matmul with a collective for each group of its waves: the matmul has fewer SMs, the last group's collective is in sight."""
    matmul = matmul_seconds(sizes, machine) / machine.wave_efficiency
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes / machine.wave_efficiency
    groups = machine.wave_groups
    return max(matmul + wire / groups, matmul / groups + wire) + groups * machine.collective_seconds


def wave_pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether groups of waves are estimated to be at least 5 % faster than ``keep``: 25 % in groups larger than those that were measured, and where none were."""
    if sizes.tiles < machine.fused_tiles:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    margin = _MARGIN if sizes.world_size <= machine.wave_ranks else _MARGIN_UNMEASURED
    return wave_seconds(sizes, machine) * margin < keep


def ring_pays(sizes: SiteSizes, machine: Machine, parts: int) -> bool:
    """Whether the ring is estimated to be at least 5 % faster than ``keep``, and hides more than its steps cost: one step may be cheaper than a collective
    of next to nothing, but not for the host."""
    matmul, wire = matmul_seconds(sizes, machine), sizes.legs * sizes.bytes_sent / machine.link_bytes
    if min(matmul, wire) < sizes.legs * (sizes.world_size - 1) * parts * machine.step_seconds:
        return False
    return ring_seconds(sizes, machine, parts) * _MARGIN < matmul + collective_seconds(sizes, machine)

# SPDX-License-Identifier: Apache-2.0
"""The cost model estimates the seconds of a site's matmul alone and of its collective alone.

Without overlap a site takes ``T_matmul + T_collective``. A schedule hides a part of one time behind the other, and pays
a fixed cost. The schedule's ``cost.py`` says how much stays exposed. The CommFuse paper (section 1.3) uses estimates of
this form. XLA uses such an estimate to decide whether to write a windowed einsum.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from overlap_inductor.facts.machine import Machine

MARGIN = 1.05
"""With ``OVERLAP_INDUCTOR_SCHEDULE=auto``, a schedule is chosen only if it is estimated to be more than this many times
as fast as ``keep``. Experts in schedule ``chunked`` have a margin of their own."""
MARGIN_IN_STRETCH = 1.01
"""Takes the place of ``MARGIN`` for a collective that the sequence-parallel rewrite wrote. With
``sequence_parallel=auto``, the rewrite compares the whole stretch, with a margin of its own
(``passes.sequence.estimate``). A larger margin here would leave gathers exposed, and then the rewrite would not pay.
With ``on``, the stretch is rewritten in any case."""
MARGIN_UNMEASURED = 1.25
"""Takes the place of ``MARGIN`` where there are few measurements or none:

- ``chunked``, ``fused``, ``wave_groups``: groups with more ranks than the largest measured group.
- ``chunked``, ``fused``: matmuls that contract the dim that an all-to-all exchanges.
- ``chunked``: experts in training.
- ``ring``, ``early_start``: attention on GPUs.
- ``ring``: gradients of lookups on GPUs.
"""


@dataclass(frozen=True)
class SiteSizes:
    """Sizes of one site at one token count.

    Attributes:
        flops: FLOPs of its matmuls.
        bytes_sent: bytes that a rank sends in each leg.
        itemsize: bytes of an element of the matmuls' left operand.
        legs: 2 for an all-reduce (a reduce-scatter and an all-gather), and for rows that are sent and returned; else 1.
        tiles: number of output tiles of 128 x 256 elements, of all matmuls together. If the matmuls run one after
            another: of the matmul with the most tiles.
        gathers: whether the collective is an all-gather.
        outputs: whether an all-gather moves the matmuls' result.
        exchanges: whether the collective is an all-to-all.
        replays: whether a call's launches are replayed as one CUDA graph (``runtime.replay``).
        weights: bytes of experts' weights that a grouped matmul reads; else 0.
        handed_out: bytes of the gathered tensor that an op copies out of its workspace for other nodes than the
            matmuls.
        received: bytes that a rank receives in an all-to-all after the matmuls; else 0. An op copies them out of its
            workspace.
        contracted: bytes that a rank receives in an all-to-all before matmuls that contract the exchanged dim; else 0.
            For ``attention_all_to_all`` it is also set, but not used.
        memory: bytes that lookups in tables read and write.
        lookups: number of ops such as ``embedding_bag``, each of which looks up rows in a table.
        repeated: extra bytes of each piece after the first. If M or N is cut, a piece reads the other operand again. If
            K is cut, a piece reads and writes the whole product.
        skipped: the part of ``flops`` that the program as written does not compute: causal attention skips masked keys.
        in_stretch: whether the sequence-parallel rewrite wrote the collective.
    """

    flops: float
    bytes_sent: float
    itemsize: int
    world_size: int
    legs: int = 1
    tiles: int = 0
    gathers: bool = False
    outputs: bool = False
    replays: bool = False
    handed_out: float = 0.0
    exchanges: bool = False
    received: float = 0.0
    contracted: float = 0.0
    memory: float = 0.0
    lookups: int = 0
    weights: float = 0.0
    repeated: float = 0.0
    skipped: float = 0.0
    in_stretch: bool = False


def margin_of(sizes: SiteSizes, measured: bool = True) -> float:
    """How many times as fast as ``keep`` a schedule must be estimated to be. ``measured``: whether the schedule was
    measured in such cases."""
    if not measured:
        return MARGIN_UNMEASURED
    return MARGIN_IN_STRETCH if sizes.in_stretch else MARGIN


def matmul_seconds(sizes: SiteSizes, machine: Machine) -> float:
    rate = machine.matmul_flops.get(sizes.itemsize, min(machine.matmul_flops.values()))
    multiplied = max(sizes.flops / rate, sizes.weights / machine.memory_bytes)
    return multiplied + sizes.memory / machine.memory_bytes + sizes.lookups * machine.lookup_seconds


def written_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of the matmuls in the program as written, which does not compute the ``skipped`` FLOPs."""
    return matmul_seconds(replace(sizes, flops=sizes.flops - sizes.skipped), machine)


def collective_seconds(sizes: SiteSizes, machine: Machine) -> float:
    return machine.collective_seconds + sizes.legs * sizes.bytes_sent / machine.link_bytes


def kind_of(sizes: SiteSizes, matmul: float, wire: float) -> int:
    """The index of a site's kind in the ``exposed`` constants of a schedule. 0: all-gather; 1: reduce-scatter or
    all-to-all; 2: all-reduce; 3: all-reduce for which ``wire > matmul`` (both in seconds)."""
    return 0 if sizes.gathers else sizes.legs + (sizes.legs > 1 and wire > matmul)


def copy_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds to copy the gathered tensor out of the workspace: one read and one write of ``handed_out`` bytes."""
    return 2 * sizes.handed_out / machine.memory_bytes


def receive_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds to copy the ``received`` bytes out of the workspace: one read and one write."""
    return 2 * sizes.received / machine.memory_bytes

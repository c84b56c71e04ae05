# SPDX-License-Identifier: Apache-2.0
"""Estimates of experts between two exchanges in schedule ``chunked``, with constants measured on 2 and 4 H200s
(bench/results/experts.jsonl)."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import Machine

EXPOSED = 0.1
"""Exposed fraction of the shorter of matmuls and transfers."""
PIECE_SECONDS = 75e-6
"""GPU time that a piece adds, because tiles are not full and weights are read again. On 2 GPUs, Mixtral's layer
of 8192 tokens was 0.98 to 1.05 times as fast as plain (five runs), and that of 16384 tokens 1.04 to 1.07 times."""
MARGIN = 1.04
"""``auto`` overlaps a layer in a measured group if its estimate is faster by this factor. It is less than that of other
sites, because Mixtral's layers gained more than was estimated: 1.05 to 1.07 (16384 tokens) and 1.11 (32768)."""
HOST_SECONDS, PEER_SECONDS = 1.1e-3, 0.25e-3
"""Host time of a call's launches, and of the piece of each peer. On a host without other work, calls of 2 ranks took
0.4 to 0.6 ms, and calls of 4 ranks 0.8 ms. The constants are larger, because slow hosts lose: 64 experts with 8192
tokens on 2 GPUs had 0.94 to 1.04 on slow hosts. Beside other programs, they lost up to 30 %, as with 16384 tokens on 4
GPUs. On quiet hosts, 8192 tokens had 1.19 to 1.30."""
RANKS = 4
"""The largest measured group."""


COPIES = 0.4
"""Part of the memory's rate at which values are copied into, or taken from, the order of the experts. It was not
measured in this op; kernels of ``index_copy_`` are slow."""
REORDERED = 0.6
"""Part of the memory's rate at which the program as written brings rows into the order of the experts or back. A kernel
of Inductor reads 134 MB and writes 134 MB in 160 to 165 us (H200)."""


def seconds(sizes: SiteSizes, machine: Machine, copied: float, reordered: float = 0.0) -> float:
    """The seconds of a call, less those of copies that only the program as written makes. A call takes as long as the
    host needs to launch it, or longer: the sum of

    - the longer of matmuls and transfers
    - an exposed fraction of the shorter one
    - the time that each piece adds
    - the copies of values that other nodes read, and of saved values that the experts read: ``copied`` bytes

    Each peer's piece reads the weights of all experts while it multiplies.

    ``reordered``: bytes that the program as written brings into the order of the experts, or back, and the call does
    not, because rows arrive in this order. They count only where they were measured (``_measured``).
    """
    matmul = max(matmul_seconds(sizes, machine), sizes.world_size * sizes.weights / machine.memory_bytes)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    copies = 2 * copied / (COPIES * machine.memory_bytes)
    saved = 2 * reordered / (REORDERED * machine.memory_bytes) if _measured(sizes, copied) else 0.0
    host = HOST_SECONDS + (sizes.world_size - 1) * PEER_SECONDS
    pieces = sizes.world_size * PIECE_SECONDS
    return max(max(matmul, wire) + EXPOSED * min(matmul, wire) + pieces + copies, host) - saved


def _measured(sizes: SiteSizes, copied: float) -> bool:
    """Whether such calls gained where they were timed: in groups of few ranks, at inference. In training, values are
    copied, and calls were slower."""
    return sizes.world_size <= RANKS and not copied


def pays(sizes: SiteSizes, machine: Machine, copied: float, reordered: float = 0.0) -> bool:
    """Whether the call is estimated to be more than 4 % faster than ``keep``, or 25 % where that was not measured."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    margin = MARGIN if _measured(sizes, copied) else MARGIN_UNMEASURED
    return seconds(sizes, machine, copied, reordered) * margin < keep

# SPDX-License-Identifier: Apache-2.0
"""Estimates of experts between two exchanges in schedule ``chunked``, with constants measured on 2 H200s
(bench/results/experts.jsonl)."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.machine import Machine

EXPOSED = 0.2
"""Exposed fraction of the shorter of matmuls and transfers."""
HOST_SECONDS, PEER_SECONDS = 1.2e-3, 0.35e-3
"""Host time of a call's launches, and of the piece of each peer. (Hosts differ: 1.0 ms to 1.9 ms were seen for a call
of 2 ranks.)"""
RANKS = 2
"""The largest measured group."""


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """The longer of matmuls and transfers, and an exposed fraction of the shorter one. Each piece but the first reads
    the weights of all experts again. The call takes at least as long as the host needs to launch it."""
    matmul = matmul_seconds(sizes, machine) + sizes.world_size * sizes.weights / machine.memory_bytes
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    host = HOST_SECONDS + (sizes.world_size - 1) * PEER_SECONDS
    return max(max(matmul, wire) + EXPOSED * min(matmul, wire), host)


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether the call is estimated to be more than 5 % faster than ``keep`` (25 % in groups larger than those
    measured)."""
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine) * (MARGIN if sizes.world_size <= RANKS else MARGIN_UNMEASURED) < keep

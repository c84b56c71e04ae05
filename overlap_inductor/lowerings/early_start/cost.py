# SPDX-License-Identifier: Apache-2.0
"""Estimate how many seconds an attention and an exchange take together, if the exchange runs under the attention."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import margin_of
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.machine import Machine


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """The fixed cost of the collective, plus the longer of attention and transfer."""
    return _overlapped(written_seconds(sizes, machine), sizes, machine)


def pays(sizes: SiteSizes, machine: Machine, measured: bool) -> bool:
    """Whether the schedule is estimated to be more than ``margin_of(sizes, measured)`` times as fast as ``keep``. In
    ring attention with a causal mask, the number of excluded keys may differ between ranks, but all ranks must decide
    alike. So ``pays`` also counts keys that a causal mask excludes."""
    attention = matmul_seconds(sizes, machine)
    keep = attention + collective_seconds(sizes, machine)
    return _overlapped(attention, sizes, machine) * margin_of(sizes, measured) < keep


def _overlapped(attention: float, sizes: SiteSizes, machine: Machine) -> float:
    wire = collective_seconds(sizes, machine) - machine.collective_seconds
    return machine.collective_seconds + max(attention / machine.overlapped_efficiency, wire)

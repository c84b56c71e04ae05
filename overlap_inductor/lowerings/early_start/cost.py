# SPDX-License-Identifier: Apache-2.0
"""Estimate the seconds of an attention and of an exchange that runs under it."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.machine import Machine


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """The sum of two times: the fixed cost of the collective, and attention or transfer, whichever is longer."""
    return _overlapped(written_seconds(sizes, machine), sizes, machine)


def pays(sizes: SiteSizes, machine: Machine, margin: float) -> bool:
    """Whether the site is estimated to be more than ``margin`` times as fast as ``keep``. Both estimates count the keys
    that a causal mask excludes. So they are the same for a causal block and for a block that a rank sees as a whole. In
    a causal ring, one rank may have only causal blocks and another only whole blocks, and both ranks must decide
    alike."""
    attention = matmul_seconds(sizes, machine)
    return _overlapped(attention, sizes, machine) * margin < attention + collective_seconds(sizes, machine)


def _overlapped(attention: float, sizes: SiteSizes, machine: Machine) -> float:
    wire = collective_seconds(sizes, machine) - machine.collective_seconds
    return machine.collective_seconds + max(attention / machine.overlapped_efficiency, wire)

# SPDX-License-Identifier: Apache-2.0
"""Estimate the seconds of an attention and of an exchange that runs under it."""

from __future__ import annotations

from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.machine import Machine


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """The fixed cost of the collective, and the longer of attention and transfer."""
    wire = collective_seconds(sizes, machine) - machine.collective_seconds
    attention = written_seconds(sizes, machine) / machine.overlapped_efficiency
    return machine.collective_seconds + max(attention, wire)


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    keep = written_seconds(sizes, machine) + collective_seconds(sizes, machine)
    return seconds(sizes, machine) * MARGIN < keep

# SPDX-License-Identifier: Apache-2.0
"""The doctor's list of the machine facts that ``auto`` uses for its estimates, each with its source."""

from __future__ import annotations

import json
from typing import Any

from overlap_inductor.cli.doctor_checks import GOOD
from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check
from overlap_inductor.cli.doctor_registered import ranks_here
from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.facts.machine_file import FIELDS

SECTION = "Machine facts"


def machine_facts() -> list[Check]:
    """A line for each of ``FIELDS``: the value that ``auto`` uses for a group of the ranks that ``ranks_here``
    counts. The state is ``good`` if the switch ``machine`` sets the value, else ``note``. If a switch is not valid, the
    list has only one line, which says so."""
    import torch

    from overlap_inductor.sites.sizes import machine_between

    try:
        config = OverlapConfig.from_environment(mode="on")
    except ConfigError:
        return [Check(SECTION, "facts", NOTE, "not known, because the switches are not valid")]
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    machine = machine_between(tuple(range(ranks_here()[0])), device, config)
    told = json.loads(config.machine or "{}")
    checks = []
    for name in FIELDS:
        source = "set by OVERLAP_INDUCTOR_MACHINE" if name in told else f"shipped for {machine.name}"
        state = GOOD if name in told else NOTE
        checks.append(Check(SECTION, name, state, f"{_text(getattr(machine, name))} ({source})"))
    return checks


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{rate:g} for {size} B" for size, rate in value.items())
    return f"{value:g}"

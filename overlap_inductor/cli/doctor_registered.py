# SPDX-License-Identifier: Apache-2.0
"""The doctor's list of what is registered: patterns, schedules and transports."""

from __future__ import annotations

from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check


def registered() -> list[Check]:
    """A line for each pattern, with the collective that it starts at, for each schedule, with what it computes, and for
    each transport, with the schedules that use it."""
    from overlap_inductor.lowerings.registry import SCHEDULES
    from overlap_inductor.passes.patterns import PATTERNS
    from overlap_inductor.transports.registry import transports

    checks = [Check("Patterns", p.name, NOTE, f"found at {p.kind}") for p in PATTERNS]
    for schedule in SCHEDULES:
        value = f"computes {', '.join(schedule.patterns)}; over {', '.join(schedule.transports)}"
        checks.append(Check("Schedules", schedule.name, NOTE, value))
    for transport in transports():
        users = [s.name for s in SCHEDULES if transport.name in s.transports]
        value = f"{transport.moved_by}; used by {', '.join(users) or 'no schedule'}"
        checks.append(Check("Transports", transport.name, NOTE, value))
    return checks

# SPDX-License-Identifier: Apache-2.0
"""The doctor's list of registered patterns, schedules and transports, and of the schedules that can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_inductor.cli.doctor_checks import GOOD
from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check

if TYPE_CHECKING:
    from overlap_inductor.lowerings.schedule import SiteSchedule

HERE = "Schedules that run here"


def registered() -> list[Check]:
    """A line for each pattern (with its collective), schedule (with its patterns and transports) and transport (with
    its schedules). The lines of ``runs_here`` follow the schedules."""
    from overlap_inductor.lowerings.registry import SCHEDULES
    from overlap_inductor.passes.patterns import PATTERNS
    from overlap_inductor.transports.registry import transports

    checks = [Check("Patterns", p.name, NOTE, f"found at {p.kind}") for p in PATTERNS]
    for schedule in SCHEDULES:
        over = ", ".join(schedule.transports) or "the program's own collectives"
        value = f"computes {', '.join(schedule.patterns)}; over {over}"
        checks.append(Check("Schedules", schedule.name, NOTE, value))
    checks += runs_here()
    for transport in transports():
        users = [s.name for s in SCHEDULES if transport.name in s.transports]
        value = f"{transport.moved_by}; used by {', '.join(users) or 'no schedule'}"
        checks.append(Check("Transports", transport.name, NOTE, value))
    return checks


def runs_here() -> list[Check]:
    """Whether each schedule can run between the ranks of ``ranks_here``, and if not, why not."""
    from overlap_inductor.lowerings.registry import SCHEDULES

    number, where = ranks_here()
    checks = [Check(HERE, "ranks", NOTE, where, answer=str(number))]
    for schedule in SCHEDULES:
        reason = why_not_here(schedule)
        checks.append(Check(HERE, schedule.name, NOTE if reason else GOOD, reason, answer="no" if reason else "yes"))
    return checks


def why_not_here(schedule: SiteSchedule) -> str:
    """Why the schedule cannot run between the ranks of ``ranks_here``; an empty text if it can."""
    import torch

    ranks, number = tuple(range(ranks_here()[0])), torch.cuda.device_count()
    if not number:
        return schedule.why_not_between(ranks, torch.device("cpu")) or ""
    torch.cuda.init()
    reasons: dict[str, list[int]] = {}
    for gpu in range(number):
        # In a real run, each rank calls ``why_not_between`` while its own GPU is the current one. So this call is made
        # once for each GPU, while that GPU is the current one.
        with torch.cuda.device(gpu):
            if reason := schedule.why_not_between(ranks, torch.device("cuda", gpu)):
                reasons.setdefault(reason, []).append(gpu)
    if list(reasons.values()) == [list(range(number))]:
        return next(iter(reasons))
    return "\n".join(f"GPU {', '.join(map(str, found))}: {reason}" for reason, found in reasons.items())


def ranks_here() -> tuple[int, str]:
    """The number of ranks for which schedules are checked, and where these ranks are."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return 2, "on CPUs, because no GPU is visible"
    if gpus == 1:
        return 2, "on GPUs, one of them on another machine, because this machine has one GPU"
    return gpus, "one on each GPU"

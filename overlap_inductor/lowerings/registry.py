# SPDX-License-Identifier: Apache-2.0
"""The list of all schedules. To add a schedule, write its folder and register the schedule here."""

from __future__ import annotations

from importlib import import_module

from overlap_inductor.facts import names
from overlap_inductor.lowerings.chunked.schedule import CHUNKED
from overlap_inductor.lowerings.early_start.schedule import EarlyStart
from overlap_inductor.lowerings.fused.schedule import FUSED
from overlap_inductor.lowerings.ring.schedule import RingSchedule
from overlap_inductor.lowerings.schedule import SiteSchedule
from overlap_inductor.lowerings.small_message.schedule import SMALL_MESSAGE
from overlap_inductor.lowerings.wave_groups.schedule import WAVE_GROUPS

SCHEDULES: list[SiteSchedule] = []
"""The registered schedules, in the order of their registration. For token counts that a schedule does not serve itself,
its op may call another schedule's op. The other schedule is the first in this list that is ``called_by_others`` and
pays. If several such schedules pay, the one with the lowest host cost should be called. So it is registered before the
others."""


def register(schedule: SiteSchedule) -> None:
    """Add ``schedule`` after all others. Raises ``ValueError`` if its name is taken or is not an identifier."""
    names.SCHEDULES.add(schedule.name)
    SCHEDULES.append(schedule)


def unregister(schedule: SiteSchedule) -> None:
    """Undo ``register``. Raises ``ValueError`` if the schedule is not registered."""
    names.SCHEDULES.remove(schedule.name)
    SCHEDULES.remove(schedule)


def schedule_named(name: str) -> SiteSchedule:
    """The schedule of this name. Raises ``StopIteration`` if there is none."""
    return next(s for s in SCHEDULES if s.name == name)


def define_ops() -> None:
    """Define every op of ``overlap_inductor::``. A graph from a cache needs the ops, even if this process did not run
    the pass."""
    for name in ("overlap_inductor.lowerings.group_ops", *(m for s in SCHEDULES for m in s.ops)):
        import_module(name)


register(RingSchedule())
register(FUSED)
register(CHUNKED)
register(WAVE_GROUPS)
register(SMALL_MESSAGE)
register(EarlyStart())

"""The schedules. A new one is a folder and a line here."""

from __future__ import annotations

from importlib import import_module

from overlap_inductor.lowerings.chunked.schedule import CHUNKED
from overlap_inductor.lowerings.fused.schedule import FUSED
from overlap_inductor.lowerings.ring.schedule import RingSchedule
from overlap_inductor.lowerings.schedule import SiteSchedule
from overlap_inductor.lowerings.small_message.schedule import SMALL_MESSAGE
from overlap_inductor.lowerings.wave_groups.schedule import WAVE_GROUPS

SCHEDULES: list[SiteSchedule] = [RingSchedule(), FUSED, CHUNKED, WAVE_GROUPS, SMALL_MESSAGE]
"""Of several whose ops another one can call (``called_by_others``), the one that costs the host less comes first."""


def schedule_named(name: str) -> SiteSchedule:
    """The schedule of this name."""
    return next(s for s in SCHEDULES if s.name == name)


def define_ops() -> None:
    """Define every op of ``overlap_inductor::``: a graph that is loaded from a cache calls them, too."""
    for name in ("overlap_inductor.lowerings.group_ops", *(m for s in SCHEDULES for m in s.ops)):
        import_module(name)

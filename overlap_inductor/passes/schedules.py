"""All schedules that a site can be planned with. A new one is one entry here, its plan module and its op."""

from __future__ import annotations

from overlap_inductor import cost_model
from overlap_inductor.lowerings import fused_plan
from overlap_inductor.passes.one_op_site import OneOpSchedule
from overlap_inductor.passes.ring_site import RingSchedule
from overlap_inductor.passes.site_schedule import SiteSchedule

RING = RingSchedule()
FUSED = OneOpSchedule(
    "fused",
    ("sm_push",),
    "in a fused kernel",
    "fused kernel",
    ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    fused_plan,
    cost_model.fused_seconds,
    cost_model.fused_pays,
)

SCHEDULES: tuple[SiteSchedule, ...] = (RING, FUSED)


def schedule_named(name: str) -> SiteSchedule:
    """The schedule of this name."""
    return next(s for s in SCHEDULES if s.name == name)

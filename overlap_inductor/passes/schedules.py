"""All schedules that a site can be planned with. A new one is one entry here, its plan module, and its op in ``lowerings.all_ops``."""

from __future__ import annotations

from overlap_inductor import cost_model
from overlap_inductor.lowerings import chunked_plan
from overlap_inductor.lowerings import fused_plan
from overlap_inductor.lowerings import wave_plan
from overlap_inductor.passes.fused_site import FusedSchedule
from overlap_inductor.passes.one_op_site import OneOpSchedule
from overlap_inductor.passes.ring_site import RingSchedule
from overlap_inductor.passes.site_schedule import SiteSchedule
from overlap_inductor.passes.small_site import SmallMessageSchedule
from overlap_inductor.torch_compat import symmetric

RING = RingSchedule()
FUSED = FusedSchedule(
    name="fused",
    transports=("sm_push", "copy_engine"),
    called="in a fused kernel",
    noun="fused kernel",
    patterns=("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    plan=fused_plan,
    cost=cost_model.fused_seconds,
    pays=cost_model.fused_pays,
    reach=lambda ranks, device: symmetric.why_no_symmetric_memory(ranks, device),
    needed=fused_plan.needed,
    replays=True,
)
CHUNKED = OneOpSchedule(
    name="chunked",
    transports=("copy_engine", "sm_push"),
    called="in chunks",
    noun="schedule in chunks",
    patterns=("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    plan=chunked_plan,
    cost=cost_model.chunked_seconds,
    pays=cost_model.chunked_pays,
    reach=lambda ranks, device: symmetric.why_no_symmetric_memory(ranks, device),
    needed=chunked_plan.needed,
    replays=True,
    why_not_scaled=lambda dtype, inner, columns: chunked_plan.why_not(dtype, inner, columns, scaled=True),
    sums=True,
)
WAVE_GROUPS = OneOpSchedule(
    name="wave_groups",
    transports=("nccl",),
    called="in groups of waves",
    noun="signalling matmul",
    patterns=("matmul_reduce_scatter", "matmul_all_reduce"),
    plan=wave_plan,
    cost=cost_model.wave_seconds,
    pays=cost_model.wave_pays,
    reach=lambda ranks, device: symmetric.why_no_kernels(device),
    # (Every size is measured at its first call.)
    dynamic=False,
)

SMALL_MESSAGE = SmallMessageSchedule()

ONE_OP: tuple[SiteSchedule, ...] = (FUSED, CHUNKED)
"""Whose op a small message's can call for tokens beyond its own; the one that costs the host less first."""
SCHEDULES: tuple[SiteSchedule, ...] = (RING, FUSED, CHUNKED, WAVE_GROUPS, SMALL_MESSAGE)


def schedule_named(name: str) -> SiteSchedule:
    """The schedule of this name."""
    return next(s for s in SCHEDULES if s.name == name)

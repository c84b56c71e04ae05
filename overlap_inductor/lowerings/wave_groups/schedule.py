# SPDX-License-Identifier: Apache-2.0
"""Schedule ``wave_groups`` for a site: one op, whose sizes must be known at compile time."""

from __future__ import annotations

from overlap_inductor.lowerings.one_op.schedule import OneOpSchedule
from overlap_inductor.lowerings.wave_groups import cost
from overlap_inductor.lowerings.wave_groups import parameters
from overlap_inductor.torch_compat import symmetric

WAVE_GROUPS = OneOpSchedule(
    name="wave_groups",
    called="in groups of waves",
    noun="signalling matmul",
    patterns=("matmul_reduce_scatter", "matmul_all_reduce"),
    plan=parameters,
    parameters=parameters.WaveParameters,
    cost=cost.seconds,
    pays=cost.pays,
    reach=lambda ranks, device: symmetric.why_no_kernels(device),
    # At the first call of each size, the op measures, and plans all calls of this size. With dynamic sizes, any call
    # could bring a new size, and would then have to measure.
    dynamic=False,
    ops=("overlap_inductor.lowerings.wave_groups.ops",),
)

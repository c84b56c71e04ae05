"""Importing this defines every op of ``overlap_inductor::``: a graph that is loaded from a cache calls them, too."""

import overlap_inductor.lowerings.chunked_ops
import overlap_inductor.lowerings.chunked_scaled_ops
import overlap_inductor.lowerings.chunked_sum_ops
import overlap_inductor.lowerings.fused_ops
import overlap_inductor.lowerings.looping
import overlap_inductor.lowerings.looping_gather
import overlap_inductor.lowerings.ops
import overlap_inductor.lowerings.small_ops
import overlap_inductor.lowerings.wave_ops  # noqa: F401

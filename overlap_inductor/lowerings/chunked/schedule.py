# SPDX-License-Identifier: Apache-2.0
"""Schedule ``chunked``: a site becomes one op. There are ops for plain matmuls, fp8 matmuls, sums of matmuls,
matmuls that contract the exchanged dim, and experts between two exchanges."""

from __future__ import annotations

from overlap_inductor.lowerings.chunked import cost
from overlap_inductor.lowerings.chunked import parameters
from overlap_inductor.lowerings.chunked.experts import PATTERN as EXPERTS
from overlap_inductor.lowerings.chunked.experts import ExpertsSchedule
from overlap_inductor.torch_compat import symmetric

EXCHANGES = ("matmul_all_to_all", "all_to_all_matmul")

PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather")

CHUNKED = ExpertsSchedule(
    name="chunked",
    called="in chunks",
    noun="schedule in chunks",
    patterns=(*PATTERNS, *EXCHANGES, EXPERTS),
    plan=parameters,
    parameters=parameters.ChunkedParameters,
    cost=cost.seconds,
    pays=cost.pays,
    reach=lambda ranks, device: symmetric.why_no_symmetric_memory(ranks, device),
    needed=parameters.needed,
    replays=True,
    called_by_others=True,
    ops=tuple(
        f"overlap_inductor.lowerings.chunked.{name}"
        for name in ("ops", "scaled_ops", "sum_ops", "experts_ops", "gate_ops", "grouped_ops")
    ),
    only_plain=("matmul_all_gather", *EXCHANGES),
    why_not_scaled=lambda dtype, inner, columns: parameters.why_not(dtype, inner, columns, scaled=True),
    sums=True,
    contracts=parameters.CONTRACTED,
)

# SPDX-License-Identifier: Apache-2.0
"""Runs a sequence-parallel block forward and backward, with schedules ``chunked`` and ``fused``, on several processes.
Kernels run in Triton's interpreter. Results are compared with fp64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.support import dtensor_block
from bench.support.dtensor_block import Variant
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.shared_memory import use_shared_memory

# The backward has two reduce-scatters of sums of matmuls. No fused kernel computes a sum of matmuls, so
# ``fused`` keeps these sites.
EXPECTED = {
    "chunked": {
        "forward: all_gather_matmul chunked": 2,
        "forward: matmul_reduce_scatter chunked": 2,
        "backward: all_gather_matmul chunked": 2,
        "backward: matmul_reduce_scatter chunked": 2,
    },
    "fused": {
        "forward: all_gather_matmul fused": 2,
        "forward: matmul_reduce_scatter fused": 2,
        "backward: all_gather_matmul fused": 2,
        "backward: matmul_reduce_scatter keep": 2,
    },
}


def _check(rank: int, world_size: int, folder: str, schedule: str, variant: Variant) -> list[str]:
    use_shared_memory(folder)
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule=schedule), reports)
    error, where = dtensor_block.largest_error(
        mesh, variant, lambda m: torch.compile(m, backend=backend, fullgraph=True), torch.float16
    )
    found = [] if error < 2e-2 else [f"{where} is off by {error:.2g}"]
    sites = Counter(f"{r.phase}: {s.facts.pattern} {s.decision.plan[0].schedule}" for r in reports for s in r.sites)
    return found + [f"{dict(sites)}, expected {EXPECTED[schedule]}"] * (sites != EXPECTED[schedule])


@pytest.mark.parametrize(
    ("schedule", "variant"),
    [
        ("chunked", Variant(1, 1, False, "none")),
        pytest.param("chunked", Variant(0, 2, False, "none"), marks=pytest.mark.thorough),
        ("fused", Variant(1, 1, False, "none")),
    ],
)
def test_a_block_that_trains(schedule: str, variant: Variant, tmp_path: Path) -> None:
    """A weight's gradient must be computed after the whole gathered tensor has arrived. The
    backward also reduce-scatters sums of products. Each chunk of such a sum must contain every product, computed from
    the chunk's rows."""
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), schedule, variant, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"

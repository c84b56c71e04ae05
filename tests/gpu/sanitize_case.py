# SPDX-License-Identifier: Apache-2.0
"""Makes a few small calls of the schedules of ``tests.gpu.check_stress``, for compute-sanitizer. The exit status is 1
if a result was wrong.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all \\
        torchrun --nproc-per-node 2 -m tests.gpu.sanitize_case [--schedules fused] [--ranks-share-gpus]

Without torch's caching allocator, every tensor has its own allocation. So the tool finds each access past the end of a
tensor. The tool makes kernels about fifty times slower.

``--ranks-share-gpus`` uses a gloo group, so that the tool does not check NCCL's kernels. The option leaves out schedule
``wave_groups``, which needs NCCL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch.distributed as dist

from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from tests.gpu import stress_scenarios
from tests.gpu import stress_variants
from tests.gpu.check_stress import SCHEDULES
from tests.gpu.repeated import drawn_calls
from tests.gpu.stress_scenarios import Stress
from tests.gpu.stress_sites import Shape

PATIENCE_SECONDS = 7200.0
"""Timeout of the groups and of waits in kernels."""
SHAPES = (Shape(512, 8, 128, 264), Shape(304, 16, 72, 136))
"""On 2 ranks, a shard is large enough for two bands. Not all sizes are multiples of a tile."""
CALLS = 6
"""Calls of each variant, drawn from two sites."""


def main() -> int:
    """Run all variants and print a JSON row for each. Ranks other than 0 print only the rows of wrong results. Returns
    the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--ranks-share-gpus", action="store_true")
    arguments = parser.parse_args()
    rank, world_size = start_rank(PATIENCE_SECONDS, arguments.ranks_share_gpus)
    stress = Stress(rank, world_size, {"world": dist.group.WORLD}, SHAPES)
    bad = 0
    for variant in stress_variants.variants(arguments.schedules):
        if not stress_scenarios.applies("", variant, arguments.ranks_share_gpus):
            continue
        start = time.monotonic()
        a, b = stress.sites(variant)
        wrong = sum(drawn_calls(a + b, CALLS, rank).values())
        stress.check_faults()
        bad += bool(wrong)
        if rank == 0 or wrong:
            row = {
                "schedule": variant.schedule,
                "pattern": variant.pattern,
                "way": variant.way,
                "rank": rank,
                "wrong": wrong,
                "seconds": round(time.monotonic() - start, 1),
            }
            print(json.dumps(row), flush=True)
    finish_rank()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

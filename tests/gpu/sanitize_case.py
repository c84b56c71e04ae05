# SPDX-License-Identifier: Apache-2.0
"""A few calls of every schedule and pattern, small enough for a tool that makes kernels fifty times slower. Status 1 if
a result was wrong.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all \\
        torchrun --nproc-per-node 2 -m tests.gpu.sanitize_case [--schedules fused] [--ranks-share-gpus]

Without caching every tensor is an allocation of its own, so that what is read or written beyond it is seen. A kernel's
patience is its group's timeout: hours here. ``--ranks-share-gpus``: a gloo group, on one GPU a rank where there are
enough, so that none of NCCL's kernels are looked at; without ``wave_groups``.
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
from tests.gpu import stress_sites
from tests.gpu.check_stress import SCHEDULES
from tests.gpu.repeated import drawn_calls
from tests.gpu.stress_scenarios import Stress
from tests.gpu.stress_sites import Shape

PATIENCE_SECONDS = 7200.0
SHAPES = (Shape(512, 8, 128, 264), Shape(304, 16, 72, 136))
"""Two bands of a shard on 2 ranks, and sizes that are no multiples of a tile in any dimension."""
CALLS = 6


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--ranks-share-gpus", action="store_true")
    arguments = parser.parse_args()
    rank, world_size = start_rank(PATIENCE_SECONDS, arguments.ranks_share_gpus)
    stress = Stress(rank, world_size, {"world": dist.group.WORLD}, SHAPES)
    bad = 0
    for variant in stress_sites.variants(arguments.schedules):
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

# SPDX-License-Identifier: Apache-2.0
"""Checks every pattern of schedules ``fused``, ``chunked``, ``small_message`` and ``wave_groups`` on GPUs under stress.

    torchrun --nproc-per-node 2 -m tests.gpu.check_stress [--iterations 10000] [--only delays poison] \\
        [--schedules fused chunked small_message wave_groups] [--patterns matmul_all_to_all all_to_all_matmul]
    torchrun --nproc-per-node 2 -m tests.gpu.check_stress --patterns embedding_all_to_all
    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 -m tests.gpu.check_stress --iterations 2000
    CUDA_MODULE_LOADING=LAZY torchrun --nproc-per-node 2 -m tests.gpu.check_stress --only lazy     # also with EAGER

The scenarios are in ``tests.gpu.stress_scenarios.SCENARIOS``. For each input, the first result is compared with fp64.
Later results must be bitwise equal to the first. Rank 0 prints one JSON row for each scenario and variant, with the
number of wrong results. Each other rank prints only rows in which it had wrong results. The exit status is not 0 if any
result on any rank was wrong.

Comparing runs. A row of scenario ``lazy`` has a digest of the bits of all ranks' first results. Two runs on equal
GPUs, with equal numbers of ranks and equal library versions, must give equal digests.

More ranks than GPUs. ``torchrun --nproc-per-node 8 -m tests.gpu.check_stress --ranks-share-gpus`` checks the arithmetic
on rank numbers and the protocol between ranks. Processes take turns on a GPU, so a call takes tens of milliseconds.
NCCL cannot run in this way, so ``wave_groups`` is left out.

A wait in a kernel times out after ``PATIENCE_PART`` times ``--row-seconds``. If a row takes longer than
``--row-seconds``, the process prints the stacks of all threads and ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time

import torch.distributed as dist

from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from tests.gpu import stress_scenarios
from tests.gpu import stress_sites
from tests.gpu import stress_variants
from tests.gpu.stress_scenarios import SCENARIOS
from tests.gpu.stress_scenarios import Stress

PATIENCE_PART = 0.7
"""A wait in a kernel times out after this part of a row's time limit. So its fault is reported before the process ends
at the limit."""
SCHEDULES = ("fused", "chunked", "small_message", "wave_groups")
WHERE_SHARED = ("lazy", "delays", "poison", "graphs")
"""The default scenarios if ranks share GPUs."""


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--iterations",
        type=int,
        help="calls of each variant (some scenarios make fewer); default: 10000, or 50 if ranks share GPUs",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, help="default: all; if ranks share GPUs: lazy delays poison graphs"
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--patterns", nargs="+", choices=stress_variants.PATTERNS, default=stress_variants.PATTERNS)
    parser.add_argument("--ranks-share-gpus", action="store_true")
    parser.add_argument("--one-by-one", action="store_true", help="never replay a repeated call as a CUDA graph")
    parser.add_argument("--row-seconds", type=float, default=120.0)
    found = parser.parse_args(arguments)
    found.iterations = found.iterations or (50 if found.ranks_share_gpus else 10000)
    found.only = found.only or (WHERE_SHARED if found.ranks_share_gpus else tuple(SCENARIOS))
    return found


def check(arguments: argparse.Namespace, rank: int, world_size: int) -> int:
    """Run the chosen scenarios. Returns the number of rows with wrong results on this rank."""
    stress = Stress(
        rank, world_size, stress_scenarios.make_groups(rank, world_size, PATIENCE_PART * arguments.row_seconds)
    )
    begin, rows, bad = time.monotonic(), 0, 0
    for name in arguments.only:
        scenario, part = SCENARIOS[name]
        calls = max(1, arguments.iterations // part)
        for variant in stress_variants.variants(arguments.schedules, not arguments.one_by_one):
            if variant.pattern not in arguments.patterns:
                continue
            if not stress_scenarios.applies(name, variant, arguments.ranks_share_gpus):
                continue
            faulthandler.dump_traceback_later(arguments.row_seconds, exit=True)
            start = time.monotonic()
            wrong = {site: count for site, count in scenario(stress, variant, calls).items() if count}
            stress.check_faults()
            row: dict[str, object] = {
                "check": name,
                "schedule": variant.schedule,
                "pattern": variant.pattern,
                "way": variant.way,
                "rank": rank,
                "world_size": world_size,
            }
            row |= {"wrong": sum(wrong.values()), "seconds": round(time.monotonic() - start, 2)}
            if name == "lazy":
                row |= {
                    "loading": os.environ.get("CUDA_MODULE_LOADING", ""),
                    "digest": digest_of_all_ranks(stress, variant),
                }
            else:
                row["calls"] = calls
            if wrong:
                row["where"] = wrong
            rows, bad = rows + 1, bad + bool(wrong)
            if rank == 0 or wrong:
                print(json.dumps(row), flush=True)
            dist.barrier()
            faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        last = {
            "check": "all",
            "rows": rows,
            "wrong_rows": bad,
            "connections": connections,
            "one_by_one": arguments.one_by_one,
        }
        print(json.dumps({**last, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
    return bad


def digest_of_all_ranks(stress: Stress, variant: stress_variants.Variant) -> str:
    mine = stress_sites.digest([first for calls in stress.sites(variant) for *_, first in calls])
    everyone: list[int] = [0] * stress.world_size
    dist.all_gather_object(everyone, mine)
    return f"{hash(tuple(everyone)) & (2**64 - 1):016x}"


def main() -> int:
    arguments = parsed(sys.argv[1:])
    rank, world_size = start_rank(PATIENCE_PART * arguments.row_seconds, arguments.ranks_share_gpus)
    bad = check(arguments, rank, world_size)
    finish_rank()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Checks schedule ``wave_groups`` on GPUs: results, calls under stress, and CUDA graphs.

Prints one JSON row per check. Ranks other than 0 print only the rows of failed checks.

    torchrun --nproc-per-node 4 -m tests.gpu.check_wave_groups [--calls 1000] [--replays 500] [--only stress graphs]

Run this check three times: as above, with ``NCCL_P2P_DISABLE=1``, and with ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor.lowerings.wave_groups.ops  # noqa: F401
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from tests.gpu.repeated import Repeated
from tests.gpu.repeated import host_us
from tests.gpu.repeated import late_calls
from tests.gpu.repeated import replays

PATTERNS = ("matmul_all_reduce", "matmul_reduce_scatter")


def site(
    pattern: str, rows: int, inner: int, columns: int, dtype: torch.dtype, seed: int, **settings: Any
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """``(function, inputs)`` of one op. ``rows``: a multiple of the world size."""
    generator = torch.Generator().manual_seed(seed)
    a, b, bias = (
        torch.randn(size, generator=generator).cuda().to(dtype)
        for size in ((rows, inner), (columns, inner), (columns,))
    )
    op, text, name = (
        getattr(torch.ops.overlap_inductor, f"wave_groups_{pattern}").default,
        json.dumps(settings),
        f"{pattern} {rows} {inner} {columns}",
    )
    chain = torch.zeros(1, dtype=torch.uint8, device="cuda")

    def function(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, reduce_op: str = "sum"
    ) -> torch.Tensor:
        return op(chain, a, b.t(), bias, text, reduce_op, dist.group.WORLD.group_name, name)[0]

    return function, [a, b, bias]


def numbers(rank: int, world_size: int) -> list[str]:
    """Compare results with fp64. Some sizes are not multiples of a tile. The settings give the partition of the bands
    into groups of waves, or the schedule's predictor chooses this partition. Some calls add a bias. Some calls average
    over the ranks, the others sum. Returns the problems."""
    problems = []
    for pattern in PATTERNS:
        for rows, inner, columns, settings in [
            (1000 // world_size * world_size, 520, 712, {}),
            (4096, 1024, 2048, {}),
            (4096 + 8 * world_size, 1032, 2056, {"free": [16]}),
            (
                512 * world_size,
                512,
                1024,
                {
                    "free": [1],
                    "partition": (
                        [0, 1, 2, 4] if pattern == "matmul_reduce_scatter" else [0, 1, 2 * world_size, 4 * world_size]
                    ),
                },
            ),
        ]:
            for dtype in (torch.bfloat16, torch.float16):
                function, (a, b, bias) = site(pattern, rows, inner, columns, dtype, 7 + rank, **settings)
                for with_bias, reduce_op in ((None, "sum"), (bias, "avg"), (bias, "sum")):
                    exact = a.double() @ b.double().t() + (0 if with_bias is None else bias.double())
                    dist.all_reduce(exact)
                    exact = exact / world_size if reduce_op == "avg" else exact
                    exact = exact.chunk(world_size)[rank] if pattern == "matmul_reduce_scatter" else exact
                    for call in range(2):
                        found = function(a, b, with_bias, reduce_op).double()
                        if found.shape != exact.shape or not (found - exact).abs().max() <= 2e-2 * exact.abs().max():
                            problems.append(
                                f"{pattern} {rows} {inner} {columns} {dtype} {reduce_op} {call}: off by"
                                f" {(found - exact).abs().max():.3g} of {exact.abs().max():.3g}"
                            )
    return problems


def sites(rank: int, world_size: int) -> list[Repeated]:
    """Sites that were called twice, each with the result of its second call. Every second site has many groups of
    waves. Each of these groups has a kernel that waits for the group's tiles beside the matmul."""
    made: list[Repeated] = []
    for rows in (2048, 3000 // world_size * world_size):
        for pattern in PATTERNS:
            bands = -(-rows // (world_size if pattern == "matmul_reduce_scatter" else 1) // 128)
            for settings in ({}, {"free": [16], "partition": list(range(min(bands, 15))) + [bands]}):
                function, inputs = site(pattern, rows, 1024, 4096, torch.bfloat16, 7 + rank, **settings)
                function(*inputs)
                call = functools.partial(function, *inputs)
                made.append((f"{pattern} {rows} {len(settings)}", call, call()))
    return made


def host_cost(rank: int, world_size: int) -> dict[str, float]:
    """Microseconds of host time for one call while the GPU is busy, by number of groups of waves."""
    found = {}
    for groups in (2, 8):
        function, (a, b, _) = site(
            "matmul_all_reduce",
            4096,
            1024,
            4096,
            torch.bfloat16,
            rank,
            free=[16],
            partition=[32 * i // groups for i in range(groups + 1)],
        )
        function(a, b)
        found[f"{groups} groups"] = host_us(functools.partial(function, a, b))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--replays", type=int, default=500)
    parser.add_argument("--only", nargs="*", help="names of the checks to run; default: all")
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    failed = 0
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("numbers", lambda: numbers(rank, world_size)),
        ("stress", lambda: late_calls(sites(rank, world_size), arguments.calls, rank)),
        ("graphs", lambda: replays(sites(rank, world_size), arguments.replays)),
        ("host", lambda: host_cost(rank, world_size)),
    ]
    for name, check in checks:
        if arguments.only and name not in arguments.only:
            continue
        start = time.monotonic()
        found = check()
        bad = bool(found) if isinstance(found, list) else name != "host" and any(found.values())
        failed += bad
        if rank == 0 or bad:
            print(
                json.dumps(
                    {
                        "check": name,
                        "rank": rank,
                        "world_size": world_size,
                        "found": found,
                        "ok": not bad,
                        "s": round(time.monotonic() - start, 1),
                    }
                ),
                flush=True,
            )
        dist.barrier()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

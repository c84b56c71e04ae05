# SPDX-License-Identifier: Apache-2.0
"""Checks schedule ``ring`` with NCCL: compares the cases of ``tests.support.ring_cases`` with fp64.

    torchrun --nproc-per-node 4 -m tests.gpu.check_ring

Each rank has its own GPU. ``--bench`` also times shapes of llama3-70b with and without overlap. Compiling takes nearly
all of the time. Four runs at once, each with a quarter of the cases, take about a third of the time. ::

    for i in 0 1 2 3; do torchrun --standalone --nproc-per-node 8 -m tests.gpu.check_ring --share $i/4 & done; wait
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.ring_cases import STATIC_ONLY
from tests.support.ring_cases import WITHOUT_LOOPING_OP
from tests.support.ring_cases import as_tuple
from tests.support.ring_cases import cases

MLP_TOKENS, HEAD_TOKENS = (2048, 8192, 16384), (512, 1024, 2048, 4096)


def check(
    rank: int,
    world_size: int,
    names: list[str],
    fields: dict[str, Any],
    dtype: torch.dtype,
    dynamic: bool,
    mode: str | None,
) -> list[str]:
    """Run the cases in ``names``. Returns the problems on this rank."""
    problems = []
    with overlap_inductor.overlap(schedule="ring", **fields):
        for name in names:
            if dynamic and name in STATIC_ONLY:
                continue
            torch._dynamo.reset()
            compiled: Any = None
            for size in (48, 72, 24) if dynamic else (48,):
                function, shapes, expected = cases(world_size, size)[name]
                generator = torch.Generator().manual_seed(7 + rank)
                inputs = [torch.randn(s, generator=generator, dtype=torch.float64).cuda().to(dtype) for s in shapes]
                exact = as_tuple(function(*(i.double() for i in inputs)))
                if compiled is None:
                    compiled = torch.compile(cases(world_size, 4)[name][0], dynamic=dynamic or None, mode=mode)
                tolerance = 1e-3 if dtype == torch.float32 else 6e-2
                # Inductor captures a CUDA graph at the second call, and replays it from that call on.
                for call in range(4 if mode else 1):
                    torch.compiler.cudagraph_mark_step_begin()
                    for e, f in zip(exact, as_tuple(compiled(*inputs)), strict=True):
                        if f.shape != e.shape or not torch.allclose(f.double(), e, rtol=tolerance, atol=tolerance * 4):
                            problems.append(
                                f"{name} size {size} call {call}: off by {(f.double() - e).abs().max():.3g}"
                            )
            report = overlap_inductor.last_report()
            counts = report.counters() if report else {}
            problems += [f"{name}: {notice}" for notice in (report.notices if report else [])]
            # With a node budget of 1, a site without a looping op is not overlapped.
            if "step_node_budget" in fields and name in WITHOUT_LOOPING_OP:
                expected = 0
            if counts.get("sites_overlapped", 0) != expected:
                problems.append(f"{name}: {report.counters() if report else None}, expected {expected} sites")
    return problems


def _time(functions: dict[str, Callable[[], Any]], repeats: int = 15) -> dict[str, float]:
    """The median microseconds of each function, on the slowest rank. The functions take turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    for _ in range(repeats):
        for name, function in functions.items():
            dist.barrier()
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3)
    medians = torch.tensor([statistics.median(s) for s in samples.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(samples, medians.tolist(), strict=True))


def bench(world_size: int) -> list[dict[str, Any]]:
    """Rows for the MLP of llama3-70b (hidden 8192, ffn 28672) and its head (a vocabulary of 128256), in bf16."""
    g = dist.group.WORLD
    rows = []
    patterns: dict[str, tuple[Any, Callable[[int], list[tuple[int, ...]]], tuple[int, ...]]] = {
        "all_gather_matmul": (
            lambda x, a: all_gather(x, 0, g) @ a,
            lambda m: [(m // world_size, 8192), (8192, 28672 // world_size)],
            MLP_TOKENS,
        ),
        "matmul_reduce_scatter": (
            lambda x, a: reduce_scatter(x @ a, "sum", 0, g),
            lambda m: [(m, 28672 // world_size), (28672 // world_size, 8192)],
            MLP_TOKENS,
        ),
        "matmul_all_reduce": (
            lambda x, a: all_reduce(x @ a, "sum", g),
            lambda m: [(m, 28672 // world_size), (28672 // world_size, 8192)],
            MLP_TOKENS,
        ),
        "matmul_all_gather": (
            lambda x, a: all_gather(x @ a, 1, g),
            lambda m: [(m, 8192), (8192, 128256 // world_size)],
            HEAD_TOKENS,
        ),
    }
    for pattern, (function, shapes, token_counts) in patterns.items():
        for tokens in token_counts:
            inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 32 for s in shapes(tokens)]
            torch._dynamo.reset()
            plain = torch.compile(function)
            reference = plain(*inputs)
            providers = {"keep": lambda plain=plain, inputs=inputs: plain(*inputs)}
            for parts in (1, 2, 4):
                with overlap_inductor.overlap(schedule="ring", sub_chunks=parts):
                    # Dynamo caches a compiled function by its code, so each provider gets its own code.
                    namespace = {"f": function}
                    exec("def g(x, a): return f(x, a)", namespace)
                    ring = torch.compile(namespace["g"])
                    result = ring(*inputs)
                error = (result.float() - reference.float()).abs().max().item() / reference.float().abs().max().item()
                assert error < 2e-2, f"{pattern} M={tokens}: relative error {error}"
                providers[f"ring S={parts}"] = lambda ring=ring, inputs=inputs: ring(*inputs)
            times = _time(providers)
            rows.append(
                {
                    "pattern": pattern,
                    "world_size": world_size,
                    "tokens": tokens,
                    **{k: round(v, 1) for k, v in times.items()},
                }
            )
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.gpu.check_ring")
    parser.add_argument(
        "--share", default="0/1", metavar="I/N", help="run every N-th case, from case I on (counted from 0)"
    )
    parser.add_argument(
        "--all", action="store_true", help="replace the variant with sub_chunks=1 by one with looping ops"
    )
    parser.add_argument("--graphs", action="store_true", help="run only the variant with CUDA graphs")
    parser.add_argument("--bench", action="store_true", help="time llama3-70b shapes, MLP and head")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    first, step = map(int, options.share.split("/"))
    rank, world_size = start_rank()
    names = list(cases(world_size, 4))[first::step]
    variants: list[tuple[dict[str, Any], torch.dtype, bool, str | None]] = [
        ({}, torch.float32, False, None),
        (
            {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2},
            torch.bfloat16,
            False,
            None,
        ),
        ({}, torch.bfloat16, True, None),
        ({"step_node_budget": 1} if options.all else {"sub_chunks": 1}, torch.bfloat16, False, None),
        ({}, torch.bfloat16, False, "reduce-overhead"),
    ]
    failed = 0
    for variant in variants[-1:] if options.graphs else variants:
        start = time.monotonic()
        problems = check(rank, world_size, names, *variant)
        failed += len(problems)
        if rank == 0 or problems:
            fields, dtype, dynamic, mode = variant
            print(
                f"rank {rank} of {world_size}, {len(names)} cases, {fields} {dtype} dynamic={dynamic} mode={mode}:"
                f" {problems or 'ok'} ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    if options.bench:
        for row in bench(world_size):
            if rank == 0:
                print(json.dumps(row), flush=True)
    torch._dynamo.reset()  # destroy_process_group never returns while a CUDA graph holds an NCCL kernel.
    gc.collect()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

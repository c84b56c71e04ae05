# SPDX-License-Identifier: Apache-2.0
"""Time lookups in embedding tables and their all-to-all, with each schedule and as the plain graph (``keep``).

    torchrun --nproc-per-node 2 -m bench.lookups
    torchrun --nproc-per-node 8 -m bench.lookups --tables 64 256 --batch 4096 65536 --width 64 256 --pooling 1 20 100
    torchrun --nproc-per-node 8 -m bench.lookups --mode mean --jagged --dtype bfloat16 --budget-seconds 300

Before and after the timing, the results of ``keep`` and of each schedule are compared with a result in fp64. A wrong
result ends the benchmark. Two parts of the program are also timed, each without the other: ``lookups`` is the plain
graph without the all-to-all, and ``exchange`` is only the all-to-all. All calls except ``exchange`` are compiled.

Each case gets a JSON row. The row holds each call's time with the host hidden and in the loop (``bench.timing``), and
the cost model's estimates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench import rows
from bench.support.gpu_ranks import device as gpu
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.support.lookups import TOLERANCE
from bench.support.lookups import LookupCase
from bench.support.lookups import LookupSite
from bench.timing import Clock
from bench.timing import greatest
from bench.timing import in_turn

PATTERN = "embedding_all_to_all"
SCHEDULES = ("fused", "ring")
WORKSPACE_MIB = 16384


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.lookups", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=int, nargs="+", default=[64, 256], help="tables of each rank")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[4096, 65536], help="bags that a rank looks up in each of its tables"
    )
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256], help="elements of a row")
    parser.add_argument(
        "--pooling",
        type=int,
        nargs="+",
        default=[1, 10, 100],
        help="indices of a bag; 0: one row for each index, no bags",
    )
    parser.add_argument("--height", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--mode", default="sum", choices=["sum", "mean", "weighted"])
    parser.add_argument("--jagged", action="store_true", help="bags of 0 to 2 * pooling indices")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument(
        "--most-bytes", type=float, default=4e10, help="leave out cases that need more bytes than this on a rank"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case-seconds", type=float, default=3.0)
    parser.add_argument(
        "--budget-seconds", type=float, default=540.0, help="begin no case that may end after this many seconds"
    )
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "lookups.jsonl")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> list[LookupCase]:
    """The cases that fit into memory and workspace. Cases that differ only in pooling follow each other."""
    sizes = itertools.product(options.tables, options.batch, options.width, options.pooling)
    dtype = getattr(torch, options.dtype)
    every = [LookupCase(*size, options.height, options.mode, dtype, options.jagged) for size in sizes]
    return [case for case in every if case.memory <= options.most_bytes and case.sent <= WORKSPACE_MIB << 20]


def compiled(function: Callable[..., Any], **config: Any) -> tuple[Callable[..., Any], dict[str, float]]:
    """``(call, estimates)``. The first ``call`` compiles ``function`` under ``config`` and adds the cost model's
    estimates to ``estimates``, except with mode ``off``."""
    namespace = {"function": function}
    exec("def call(*args): return function(*args)", namespace)
    made, estimates = torch.compile(namespace["call"], dynamic=False), dict[str, float]()

    def call(*operands: Any) -> Any:
        with overlap_inductor.overlap(patterns=(PATTERN,), workspace_limit=WORKSPACE_MIB, **config):
            found = made(*operands)
        report = overlap_inductor.last_report() if config["mode"] != "off" and not estimates else None
        if report is not None:
            estimates.update(report.sites[0].decision.plan[0].estimate_us)
        return found

    return call, estimates


def measured(case: LookupCase, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """The row of one case. All ranks call this together. Raises ``SystemExit`` on all ranks if a result is wrong."""
    torch._dynamo.reset()
    site = LookupSite(case, clock.device)
    kept, _ = compiled(site.plain, mode="off")
    others = {s: compiled(site.plain, schedule=s, mode="strict") for s in options.schedules}
    calls = {"keep": kept, **{name: call for name, (call, _) in others.items()}}
    every: dict[str, Callable[[], Any]] = {n: lambda c=c: c(*site.operands) for n, c in calls.items()}
    expected, errors = site.expected(), {}
    for name, call in every.items():
        errors[name] = greatest(float((call().double() - expected).abs().max() / expected.abs().max()))
        if not errors[name] <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{name} is wrong for {case}: off by {errors[name]:.3g} of the largest element")
    pooled = torch.zeros(case.batch, case.tables * case.width, device=clock.device, dtype=case.dtype)
    alone = LookupSite.__new__(LookupSite)
    alone.case, alone.exchange = case, lambda found: found  # type: ignore[method-assign]
    looked_up, _ = compiled(alone.plain, mode="off")
    every |= {"lookups": lambda: looked_up(*site.operands), "exchange": lambda: site.exchange(pooled)}
    times = {}
    for setting in ("hidden", "compiled"):
        found = in_turn(clock, every, setting == "hidden", options.repeats, options.case_seconds)
        times[setting] = {name: asdict(timing) for name, timing in found.items()}
    for name, call in calls.items():
        if (
            not greatest(float((call(*site.operands).double() - expected).abs().max() / expected.abs().max()))
            <= (TOLERANCE[case.dtype])
        ):
            raise SystemExit(f"{name} is wrong for {case} after the calls were timed")
    estimates = next((found for _, found in others.values()), {})
    return {
        "benchmark": "lookups",
        **{k: str(v).removeprefix("torch.") if k == "dtype" else v for k, v in asdict(case).items()},
        "world_size": dist.get_world_size(),
        "us": times,
        "errors": errors,
        "estimates_us": estimates | {name: found[name] for name, (_, found) in others.items() if name in found},
    }


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    start, options = time.monotonic(), parsed(arguments)
    rank, _ = start_rank(120.0)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    clock, where, longest = Clock(gpu()), rows.environment(gpu()), 0.0
    for case in cases(options):
        before = greatest(time.monotonic() - start)
        if longest and before + longest > options.budget_seconds:
            break
        row = measured(case, options, clock) | where
        longest = max(longest, greatest(time.monotonic() - start) - before)
        if rank == 0:
            rows.append(options.out, [row])
            medians = {name: round(t["median"], 1) for name, t in row["us"]["hidden"].items()}
            print(json.dumps({"case": str(case), "us": medians, "estimates": row["estimates_us"]}), flush=True)
        torch.cuda.empty_cache()
    finish_rank()
    return 0


if __name__ == "__main__":
    sys.exit(main())

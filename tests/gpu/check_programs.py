# SPDX-License-Identifier: Apache-2.0
"""Checks random programs (``tests.support.random_programs``) on GPUs, compiled with several schedules.

    torchrun --nproc-per-node 2 -m tests.gpu.check_programs [--schedules chunked fused ring auto] [--seeds 0 30] \\
        [--trains] [--exchanges] [--mode reduce-overhead] [--dynamic] [--seconds 120]

Each program is called three times, with different values. An error against fp64 may be up to 2 % of the largest
element, or three times the uncompiled function's error. The larger limit counts. Prints one JSON row per schedule. The
exit status is 1 if a result is wrong or a report has a notice, for example of a failed rewrite.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting
from tests.support.exchange_programs import ExchangeProgram
from tests.support.random_programs import Program
from tests.support.random_programs import outcome

SCHEDULES = ("chunked", "fused", "wave_groups", "ring", "auto")
CALLS = 3
UNIT = 64
"""Most sizes are multiples of this number, so most rows have a multiple of 16 bytes. Not all sizes are multiples of a
tile."""


def wrong(
    program: Program, schedule: str, mode: str | None, dynamic: bool, rank: int, overlapped: Counter[str]
) -> list[str]:
    """Run the compiled program and return its problems. ``dynamic``: the rows of the first two inputs may be
    symbolic. These rows are dim 0 of the first input and dim 1 of the second."""
    torch._dynamo.reset()
    reporting.forget_reports()
    function = program.function()
    problems = []
    with overlap_inductor.overlap(schedule=schedule):
        compiled = torch.compile(function, dynamic=None if dynamic else False, mode=mode)

        def called(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for i in range(2 * dynamic):
                torch._dynamo.maybe_mark_dynamic(inputs[i], i)
            return compiled(*inputs)

        for call in range(CALLS):
            generator = torch.Generator("cuda").manual_seed(1000 * program.seed + 10 * call + rank)
            inputs = [(torch.randn(s, device="cuda", generator=generator) / 4).bfloat16() for s in program.inputs]
            exact, plain = (
                outcome(function, [i.to(dtype) for i in inputs], program.trains)
                for dtype in (torch.float64, torch.bfloat16)
            )
            for i, (e, p, f) in enumerate(zip(exact, plain, outcome(called, inputs, program.trains), strict=True)):
                if not e.numel():
                    continue
                bound = max(2e-2 * e.abs().max(), 3 * (p.double() - e).abs().max())
                error = (f.double() - e).abs().max() if f.shape == e.shape else torch.inf
                if not error <= bound:
                    problems.append(
                        f"program {program.seed}, call {call}, result {i}: off by {error:.3g} (bound {bound:.3g}) of"
                        f" {e.abs().max():.3g}\n{program.text}"
                    )
    for report in reporting.all_reports():
        problems += [f"program {program.seed}: {notice[:600]}\n{program.text}" for notice in report.notices]
        overlapped.update(
            f"{s.facts.pattern} {s.decision.moving.schedule}" for s in report.sites if s.decision.status == "overlapped"
        )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 30), metavar=("FIRST", "END"))
    parser.add_argument("--trains", action="store_true", help="compare gradients, too")
    parser.add_argument("--exchanges", action="store_true", help="programs with many all-to-alls")
    parser.add_argument("--mode", help="mode of torch.compile")
    parser.add_argument("--dynamic", action="store_true", help="the rows of the first two inputs may be symbolic")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time per schedule after which no program is begun"
    )
    arguments = parser.parse_args()
    drawn = ExchangeProgram if arguments.exchanges else Program
    rank, world_size = start_rank()
    failed = 0
    for schedule in arguments.schedules:
        begin, tried = time.monotonic(), 0
        overlapped: Counter[str] = Counter()
        problems: list[str] = []
        for seed in range(*arguments.seeds):
            late = torch.tensor([time.monotonic() - begin > arguments.seconds], dtype=torch.int32, device="cuda")
            dist.all_reduce(late)
            if late.item():
                break
            problems += wrong(
                drawn(seed, world_size, UNIT, arguments.trains, most_elements=2**22),
                schedule,
                arguments.mode,
                arguments.dynamic,
                rank,
                overlapped,
            )
            tried += 1
        failed += len(problems) > 0
        row: dict[str, Any] = {
            "schedule": schedule,
            "rank": rank,
            "world_size": world_size,
            "trains": arguments.trains,
            "exchanges": arguments.exchanges,
            "mode": arguments.mode,
            "dynamic": arguments.dynamic,
            "programs": tried,
            "overlapped": dict(overlapped),
        }
        if rank == 0 or problems:
            print(
                json.dumps(
                    row | {"problems": problems[:5], "wrong": len(problems), "s": round(time.monotonic() - begin, 1)}
                ),
                flush=True,
            )
    torch._dynamo.reset()  # destroy_process_group never returns while a CUDA graph holds an NCCL kernel.
    gc.collect()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

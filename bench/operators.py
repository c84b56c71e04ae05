# SPDX-License-Identifier: Apache-2.0
"""Time the plain computation (``keep``), Inductor's async TP, and every schedule over each of its transports.

    torchrun --nproc-per-node 8 -m bench.operators                      # README's picture shows some of these cases
    torchrun --nproc-per-node 4 -m bench.operators --shapes llama3-8b-mlp --tokens 1 16 128 \\
        --patterns matmul_all_reduce --budget-seconds 60
    torchrun --nproc-per-node 4 -m bench.operators --dtype fp8_rows --schedules chunked auto
    torchrun --nproc-per-node 4 -m bench.operators --schedules fused --settings hidden \\
        --set fused.parts=1 fused.parts=2,pushers=8

A case is a pattern of a layer at a token count. Its providers (``bench.providers``) compute it on the same random data.
Each round of the timing takes one sample of every provider, of the matmul alone and of the collective alone. Before and
after the timing, each result is compared with one in fp32 (fp64 for fp32 operands). A wrong result ends the benchmark.

Settings:

- ``hidden``: the GPU sleeps before each call, so the host's time does not count.
- ``compiled``: calls run one after the other, so a slow host makes the time longer. All providers except ``async_tp``
  are compiled graphs; ``keep`` is Inductor's plain graph.

A row's time is the median over rounds, then the maximum over ranks. When a case has been timed in a setting, its rows
are appended to the file ``--out`` (``bench.rows``). ``python -m bench.report`` makes tables and plots from stored rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import rows
from bench import tables
from bench.measure import WrongResult
from bench.measure import measure
from bench.providers import SETTINGS
from bench.providers import Variant
from bench.providers import kinds_of
from bench.providers import provider_names
from bench.providers import why_not
from bench.shapes import DTYPES
from bench.shapes import SHAPES
from bench.shapes import Case
from bench.timing import Clock
from bench.timing import greatest
from overlap_inductor.passes.patterns import PATTERNS

GROUP_TIMEOUT = timedelta(seconds=120)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.operators", description=(__doc__ or "").splitlines()[0])
    patterns, offered = [p.name for p in PATTERNS if p.example is not None], provider_names()
    kinds = kinds_of(offered)
    parser.add_argument(
        "--shapes", nargs="+", default=["llama3-70b-mlp"], choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument(
        "--patterns", nargs="+", default=patterns, choices=patterns, metavar="PATTERN", help=", ".join(patterns)
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="tokens of all ranks together"
    )
    parser.add_argument(
        "--schedules",
        nargs="*",
        default=kinds,
        choices=[*kinds, *offered],
        metavar="SCHEDULE",
        help=f"{', '.join(kinds)}; or with one transport, such as fused/sm_push",
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        dest="variants",
        metavar="SCHEDULE.PARAMETER=VALUE[,...]",
        help="for each argument, time one more provider: the schedule with these parameters (host hidden only)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=list(DTYPES),
        help="fp8: one scale per operand; fp8_rows: one per row and column",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=20, help="largest number of samples of one provider")
    parser.add_argument(
        "--case-seconds",
        type=float,
        default=1.0,
        help="seconds to time one case in one setting; each provider still gets five samples, or --repeats if less",
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="begin no case that may end after this time"
    )
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "operators.jsonl")
    found = parser.parse_args(arguments)
    try:
        found.variants = [Variant.parse(text) for text in found.variants]
    except ValueError as error:
        parser.error(str(error))
    return found


def cases(arguments: argparse.Namespace, world_size: int) -> list[Case]:
    """All cases. Cases with more tokens come first, so that later cases can use the workspace of earlier ones."""
    sizes = itertools.product(sorted(arguments.tokens, reverse=True), arguments.shapes, arguments.patterns)
    return [Case(shape, pattern, tokens, world_size, arguments.dtype) for tokens, shape, pattern in sizes]


def say(*lines: object) -> None:
    if dist.get_rank() == 0 and lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def left_out(arguments: argparse.Namespace, all_cases: Sequence[Case], device: torch.device) -> list[str]:
    """A line for each case that cannot be cut into equal shards. If a provider cannot compute some cases of a pattern,
    also a line for each reason."""
    lines = [f"{case}: {case.why_not()}" for case in all_cases if case.why_not()]
    wanted = [n for n in provider_names() if n in arguments.schedules or n.split("/")[0] in arguments.schedules] + [
        v.name for v in arguments.variants
    ]
    for name in wanted:
        lines += dict.fromkeys(
            f"{name}: {case.pattern}: {reason}" for case in all_cases if (reason := why_not(name, case, device))
        )
    return lines


def run(arguments: argparse.Namespace, device: torch.device, start: float) -> list[dict[str, Any]]:
    """Measure the cases and return their rows. Rank 0 also appends them to the file. All ranks call this together.

    The time budget begins at ``start``. The first case always runs. Each later case is assumed to take as long as the
    longest case so far. When that time exceeds the rest of the budget, no further case runs.
    """
    clock, world_size, where = Clock(device), dist.get_world_size(), rows.environment(device)
    found: list[dict[str, Any]] = []
    all_cases = cases(arguments, world_size)
    say(*left_out(arguments, all_cases, device))
    longest = 0.0
    for number, case in enumerate(all_cases):
        if case.why_not():
            continue
        # All ranks must begin the same cases, so the longest of the ranks' times decides.
        before = greatest(time.monotonic() - start)
        if found and before + longest > arguments.budget_seconds:
            say(
                f"{len(all_cases) - number} of {len(all_cases)} cases left out: {before:.0f} s of"
                f" {arguments.budget_seconds:.0f} s have passed"
            )
            break
        for some in measure(
            case,
            arguments.schedules,
            arguments.variants,
            arguments.settings,
            clock,
            arguments.repeats,
            arguments.case_seconds,
            where,
        ):
            found += some
            if dist.get_rank() == 0:
                rows.append(arguments.out, some)
        seconds = greatest(time.monotonic() - start)
        longest = max(longest, seconds - before)
        say(f"{case}: {seconds - before:.1f} s, {seconds:.0f} s in all")
        torch._dynamo.reset()
    return found


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    start, options = time.monotonic(), parsed(arguments)
    if options.device == "cuda":
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device, timeout=GROUP_TIMEOUT)
        # The op of async TP needs symmetric memory of the group.
        symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    torch.manual_seed(dist.get_rank())
    # At the limit of recompiles, Dynamo would run a function uncompiled. With this setting it raises an error.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        found = run(options, device, start)
    except WrongResult as error:
        # All ranks raise this error together. The rows of earlier cases are already stored.
        say(error)
        raise SystemExit(1) from error
    if dist.get_rank() == 0:
        print(tables.operators(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

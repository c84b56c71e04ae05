# SPDX-License-Identifier: Apache-2.0
"""Checks, on GPUs, ranks that would exchange different data. All ranks must then run the plain program.

    torchrun --nproc-per-node 3 -m tests.gpu.check_differ [--ranks-share-gpus] [--schedules fused chunked ...]

Each schedule runs one block in three cases:

- ``alike``: all ranks have the same switches. They must overlap.
- ``differ``: the last rank has a pattern switched off. All ranks must run the plain program.
- ``alone``: first, all ranks overlap. Then only the last rank compiles again, with a pattern switched off. All ranks
  must now run the plain program. Later, the last rank compiles with the other ranks' switches again.
  All results must still be right.

Prints one JSON row for each schedule and case. The exit status is 1 if a result is wrong or a case fails.

With ``--ranks-share-gpus``, several ranks may share a GPU. The block then has all-reduces only, because gloo crashes in
an all-gather or reduce-scatter of GPU tensors.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter

SECONDS = 60
"""Time limit of a case. A rank that exceeds it prints its stacks and ends."""
SCHEDULES = ("ring", "fused", "chunked", "small_message")
PATTERNS = {
    "ring": "all_gather_matmul",
    "fused": "all_gather_matmul",
    "chunked": "matmul_reduce_scatter",
    "small_message": "matmul_all_reduce",
}
"""The pattern that the last rank switches off. If ranks share GPUs, it switches off ``matmul_all_reduce``."""
ROWS = {"alike": 256, "differ": 384, "alone": 320}
"""Rows of the block's input in each case. The numbers differ, so each case has new plans."""


def block(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """A block with three sites: gather, scatter and all-reduce."""

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        y = reduce_scatter(torch.relu(all_gather(x, 0, group) @ a) @ b, "sum", 0, group)
        return all_reduce(y @ c, "sum", group)

    return function


def shared_block(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """A block with all-reduces only, which gloo supports for GPU tensors."""

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.relu(all_reduce(torch.relu(x @ a) @ b, "sum", group) / 8) @ c, "sum", group)

    return function


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks-share-gpus", action="store_true")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    arguments = parser.parse_args()
    rank, world_size = start_rank(seconds=120, share_gpus=arguments.ranks_share_gpus)
    if arguments.ranks_share_gpus:
        # Without this patch, the planner would refuse ranks that share a GPU.
        symmetric.why_no_symmetric_memory = lambda ranks, device: symmetric.why_no_kernels(device)
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    failed = 0
    # Ranks that share GPUs use gloo, which cannot send from a GPU's memory. So the ring is left out.
    for schedule in [s for s in arguments.schedules if s != "ring" or not arguments.ranks_share_gpus]:
        for how, rows in ROWS.items():
            begun = time.monotonic()
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            reporting.forget_reports()
            off = ("matmul_all_reduce",) if arguments.ranks_share_gpus else (PATTERNS[schedule],)
            last, everything = rank == world_size - 1, overlap_inductor.OverlapConfig().patterns
            fewer = tuple(p for p in everything if p not in off)
            function = (shared_block if arguments.ranks_share_gpus else block)(dist.group.WORLD)
            errors: list[float] = []
            turns = {"alike": [everything], "differ": [fewer if last else everything]}.get(
                how, [everything, fewer if last else everything, everything]
            )
            for turn, patterns in enumerate(turns):
                if turn and patterns != turns[turn - 1]:
                    torch._dynamo.reset()
                with overlap_inductor.overlap(schedule=schedule, patterns=patterns, agreement_timeout=60):
                    compiled = torch.compile(function, dynamic=False)
                    for call in range(3):
                        generator = torch.Generator("cuda").manual_seed(100 * turn + 10 * call + rank)
                        shapes = ((rows, 512), (512, 512), (512, 256), (256, 512))
                        inputs = [(torch.randn(s, device="cuda", generator=generator) / 8).bfloat16() for s in shapes]
                        exact, plain = function(*(i.double() for i in inputs)), function(*inputs)
                        found = compiled(*inputs)
                        errors.append(round(((found.double() - exact).norm() / exact.norm()).item(), 5))
                        bound = 3 * ((plain.double() - exact).norm() / exact.norm()).item()
                        failed += not errors[-1] <= max(bound, 1e-2)
            counts = torch._dynamo.utils.counters["overlap_inductor"]
            fell_back = counts["reason.ranks_differ"] > 0
            # If ranks share GPUs, the block has only the pattern that the last rank switches off. With this pattern
            # off, the last rank overlaps nothing, and counts no fallback.
            expected = how != "alike" and not (last and arguments.ranks_share_gpus)
            failed += fell_back is not expected or (how != "differ" and counts["sites_overlapped"] == 0)
            row = {
                "check": "differ",
                "schedule": schedule,
                "how": how,
                "rank": rank,
                "world_size": world_size,
                "sites": counts["sites_overlapped"],
                "fell_back": fell_back,
            }
            report = overlap_inductor.last_report()
            row["said"] = reporting.summary(report) if report is not None else "no report"
            if rank == 0 or failed:
                print(
                    json.dumps(row | {"errors": errors, "failed": failed, "s": round(time.monotonic() - begun, 1)}),
                    flush=True,
                )
    faulthandler.cancel_dump_traceback_later()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

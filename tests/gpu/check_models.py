# SPDX-License-Identifier: Apache-2.0
"""Runs the model tests with NCCL, and checks the kernels that Inductor generates for a ring's steps.

    torchrun --nproc-per-node 4 -m tests.gpu.check_models

Each rank has a GPU. Prints how long transfers ran beside matmuls.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support import block_problems
from tests.support import hugging_face_problems


def kernels(rank: int, world_size: int) -> list[str]:
    """Check that, with Triton templates, one kernel runs the matmul, the bias and the activation of a ring's step, and
    that no other kernel computes anything. Returns the problems."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    group = dist.group.WORLD
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w, b = (
        torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) / 20,
        torch.randn(256, device="cuda", dtype=torch.bfloat16),
    )
    fn = lambda x, w, b: torch.relu(torch.addmm(b, all_gather(x, 0, group), w))  # noqa: E731
    # Without the last option, each rank would measure whether to fuse, and ranks might differ.
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "benchmark_epilogue_fusion": False}
    with overlap_inductor.overlap(schedule="ring", sub_chunks=1):
        result, (code,) = run_and_get_code(torch.compile(fn, options=options), x, w, b)
    body = code[code.index("def call(") :].split("runner = ")[0]
    launched = re.findall(r"^\s*(triton_\w+)\.run\(|^\s*(extern_kernels\.\w+)\(", body, re.M)
    names = [a or b for a, b in launched]
    exact = fn(x.double(), w.double(), b.double())
    problems = (
        [] if (result.double() - exact).abs().max() < 0.05 * exact.abs().max() else ["fused templates: wrong result"]
    )
    if len(names) != world_size or not all("triton_tem_fused" in n and "relu" in n for n in names):
        problems.append(f"expected {world_size} templates with a fused relu, found {names}")
    return problems


def trace(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Times one call of a gather with a matmul, and of a matmul with a scatter, with ``keep`` and with ``ring``.

    Each row has the numbers of matmul kernels and of transfer kernels, the microseconds of each kind, and the
    microseconds in which both kinds ran. The sizes are those of llama3-70b's MLP with 8192 tokens.
    """
    group = dist.group.WORLD
    n, rows = 28672 // world_size, 8192
    cases: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
        "all_gather_matmul": (lambda x, w: all_gather(x, 0, group) @ w, ((rows // world_size, 8192), (8192, n))),
        "matmul_reduce_scatter": (lambda x, w: reduce_scatter(x @ w, "sum", 0, group), ((rows, n), (n, 8192))),
    }
    found = []
    for pattern, (fn, shapes) in cases.items():
        inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 32 for s in shapes]
        for schedule in ("keep", "ring"):
            torch._dynamo.reset()
            with overlap_inductor.overlap(schedule=schedule, sub_chunks=1):
                compiled: Any = torch.compile(fn)
                for _ in range(3):
                    compiled(*inputs)
            torch.cuda.synchronize()
            dist.barrier()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                compiled(*inputs)
                torch.cuda.synchronize()
            spans = [
                (e.name, e.time_range.start, e.time_range.end)
                for e in profile.events()
                if e.device_type == torch.autograd.DeviceType.CUDA
            ]
            matmuls = [(a, b) for name, a, b in spans if re.search(r"gemm|nvjet|cutlass|triton_tem", name)]
            transfers = [(a, b) for name, a, b in spans if "nccl" in name.lower()]
            both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in matmuls for c, d in transfers)
            row = {
                "pattern": pattern,
                "schedule": schedule,
                "matmul_kernels": len(matmuls),
                "transfer_kernels": len(transfers),
            }
            total = lambda s: round(sum(b - a for a, b in s), 1)  # noqa: E731
            found.append(
                {**row, "matmul_us": total(matmuls), "transfer_us": total(transfers), "both_us": round(both, 1)}
            )
    return found


def main() -> int:
    rank, world_size = start_rank()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    failed = 0

    def report(name: str, problems: list[str], start: float) -> None:
        nonlocal failed
        failed += len(problems)
        if rank == 0 or problems:
            print(f"rank {rank} {name}: {problems or 'ok'} ({time.monotonic() - start:.0f} s)", flush=True)

    start = time.monotonic()
    report("fused templates", kernels(rank, world_size), start)
    for by_hand in (False, True):
        for checkpointing in block_problems.EXPECTED:
            start = time.monotonic()
            report(
                f"block by_hand={by_hand} {checkpointing}",
                block_problems.problems(rank, world_size, by_hand, checkpointing, "cuda", pairs=True),
                start,
            )
    for family in hugging_face_problems.FORWARD:
        start = time.monotonic()
        torch._dynamo.reset()
        trains = family in hugging_face_problems.BACKWARD
        problems = hugging_face_problems.problems(rank, world_size, family, folder[0], trains, True, "cuda")
        report(f"{family} trains={trains}", problems, start)
    for row in trace(rank, world_size):
        if rank == 0:
            print(json.dumps({"world_size": world_size, **row}), flush=True)
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

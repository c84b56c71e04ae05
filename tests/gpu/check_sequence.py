# SPDX-License-Identifier: Apache-2.0
"""Checks the sequence-parallel rewrite on GPUs.

Tensor-parallel blocks with all-reduces run forward and backward, with several schedules.

    torchrun --nproc-per-node 8 -m tests.gpu.check_sequence [--schedules fused chunked ring auto] [--tokens 2048 2047]
    torchrun --nproc-per-node 2 -m tests.gpu.check_sequence --ranks-share-gpus --schedules fused chunked
    torchrun --nproc-per-node 2 -m tests.gpu.check_sequence --mode reduce-overhead

Results and gradients are compared with eager fp32. The error may be at most twice that of the plain compile, plus
0.001. With ``--mode reduce-overhead``, steps must run as CUDA graphs. Prints one JSON row for each case. The exit
status is 1 if a row is not right. With ``--ranks-share-gpus``, several ranks may share a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting
from overlap_inductor.torch_compat.functional_collectives import all_reduce

HIDDEN, FFN, LAYERS = 1024, 4096, 2


class SumGradient(torch.autograd.Function):
    """The input of a column-parallel layer. ``backward`` sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce(gradient, "sum", dist.group.WORLD)


class SumResult(torch.autograd.Function):
    """The output of a row-parallel layer. ``forward`` sums the output over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Block(nn.Module):
    """Pre-norm MLP blocks with a residual stream, and then a head. Each rank holds its shard of the weights.

    Each gather and scatter of the rewritten graph has a matmul and becomes a site. Ranks that share GPUs need this:
    a gather or scatter that is no site would run on gloo, and gloo cannot gather or scatter on GPUs.
    """

    def __init__(self, world_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        own = FFN // world_size

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device="cuda", dtype=dtype) / shape[-1] ** 0.5)

        self.norms = nn.ParameterList(
            [nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=dtype)) for _ in range(LAYERS + 1)]
        )
        self.gates = nn.ParameterList([make(own, HIDDEN) for _ in range(LAYERS)])
        self.ups = nn.ParameterList([make(own, HIDDEN) for _ in range(LAYERS)])
        self.downs = nn.ParameterList([make(HIDDEN, own) for _ in range(LAYERS)])
        self.head = make(own, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=False):
            n = SumGradient.apply(F.rms_norm(x, (HIDDEN,), norm, 1e-6))
            x = x + SumResult.apply(F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down))
        return F.linear(SumGradient.apply(F.rms_norm(x, (HIDDEN,), self.norms[-1], 1e-6)), self.head)


def results(model: Any, x: torch.Tensor, trains: bool) -> dict[str, torch.Tensor]:
    if not trains:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return {"y": model(x).float()}
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.float().square().mean().backward()
    return {
        "y": y.detach().float(),
        **{n.removeprefix("_orig_mod."): p.grad.float().clone() for n, p in model.named_parameters()},
    }


def off(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest error of any result, relative to the result's largest element."""
    errors = [(found[n] - e).abs().max() / e.abs().max().clamp_min(1e-12) for n, e in exact.items()]
    return float(torch.stack(errors).max())  # A tensor's ``max`` keeps a NaN, Python's ``max`` may not.


@contextmanager
def replays_counted() -> Iterator[list[int]]:
    """Yields a list with one entry for each replay of a CUDA graph so far."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        found.append(1)
        replay(self)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def case(
    schedule: str, switch: str, tokens: int, trains: bool, world_size: int, rank: int, mode: str
) -> dict[str, Any]:
    start = time.monotonic()
    torch.manual_seed(rank)
    model = Block(world_size, torch.bfloat16)
    torch.manual_seed(99)
    x = torch.randn(1, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    fp32 = in_fp32(model, world_size)
    exact = results(fp32, x.float(), trains)
    exact_of = {1: exact, -1: results(fp32, -x.float(), trains)}.__getitem__
    torch._dynamo.reset()
    with overlap_inductor.overlap(mode="off"):
        plain = off(results(torch.compile(model, dynamic=False, mode=mode), x, trains), exact)
    torch._dynamo.reset()
    reporting.forget_reports()
    with (
        overlap_inductor.overlap(schedule=schedule, sequence_parallel=switch, notice="off"),
        replays_counted() as replays,
    ):
        compiled = torch.compile(model, dynamic=False, mode=mode)
        # Further inputs show that a graph computes anew. The first calls warm up and capture.
        errors = [off(results(compiled, x, trains), exact) for _ in range(3)]
        for sign in (-1, 1):
            errors.append(off(results(compiled, x * sign, trains), exact_of(sign)))
        ours = float(torch.tensor(errors).max())
    reports = reporting.all_reports()
    stretches = list(reports[0].stretches) if reports else []
    counters = [r.counters() for r in reports]
    return {
        "schedule": schedule, "sequence_parallel": switch, "tokens": tokens, "trains": trains, "ranks": world_size,
        "sites": sum(c["sites_found"] for c in counters), "overlapped": sum(c["sites_overlapped"] for c in counters),
        "stretches": [[s.status, s.all_reduces, s.scatters, s.gathers, s.sums, s.gathered_again] for s in stretches],
        "off": round(ours, 6), "plain_off": round(plain, 6), "mode": mode, "replays": len(replays),
        "ok": ours <= 2 * plain + 1e-3
        and (switch != "on" or all(s.status == "rewritten" for s in stretches))
        and (mode == "default" or len(replays) > 0),
        "notices": [n for r in reports for n in r.notices], "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def in_fp32(model: Block, world_size: int) -> Block:
    exact = Block(world_size, torch.float32)
    exact.load_state_dict({n: p.float() for n, p in model.state_dict().items()})
    return exact


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["fused", "chunked", "ring", "auto"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 2047])
    parser.add_argument("--switches", nargs="+", default=["on"], choices=("on", "auto", "off"))
    parser.add_argument("--mode", default="default", choices=("default", "reduce-overhead"))
    parser.add_argument("--ranks-share-gpus", action="store_true")
    arguments = parser.parse_args()
    rank, world_size = start_rank(seconds=120, share_gpus=arguments.ranks_share_gpus)
    failed = False
    for schedule in arguments.schedules:
        for switch in arguments.switches:
            for tokens in arguments.tokens:
                for trains in (False, True):
                    row = case(schedule, switch, tokens, trains, world_size, rank, arguments.mode)
                    failed |= not row["ok"]
                    if rank == 0 or not row["ok"]:
                        print(json.dumps({"rank": rank, **row}), flush=True)
    # NCCL destroys a communicator only when no CUDA graph holds one of its calls, so the graphs are dropped first.
    torch._dynamo.reset()
    torch.cuda.synchronize()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

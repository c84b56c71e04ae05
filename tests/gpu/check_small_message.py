# SPDX-License-Identifier: Apache-2.0
"""Checks schedule ``small_message`` under stress on GPUs.

    torchrun --nproc-per-node 4 -m tests.gpu.check_small_message [--calls 6000] [--replays 300]

One-shot and two-shot calls with several token counts use one part (slot) of the workspace, with random delays on each
rank. Eager calls run between graph replays. Each call's first result must be close to the fp32 result. All later
results must be bitwise equal to the first. Prints one JSON row for each check.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.runtime.workspace import workspace_of

EPS = 1e-5
PATIENCE_NS = 5_000_000_000
TOKENS = (1, 3, 16, 61, 128)
Call = Callable[[], tuple[torch.Tensor, ...]]


def calls_of_one_slot(rank: int, world_size: int, columns: int) -> tuple[dict[str, Call], Launch]:
    """The calls by name, all in one slot. Each token count has one-shot and two-shot calls, with and without a norm."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = workspace_of(dist.group.WORLD, device)
    shapes = [
        (tokens, SmallParameters(two_shot, segment, warps))
        for tokens in TOKENS
        for two_shot, segment, warps in ((False, 2048, 8), (True, 1024, 4))
    ]
    needs = [small_plan.needed(p, world_size, tokens, columns, 2) for tokens, p in shapes]
    name = f"stress {columns}"
    place.prepare([Request(name, max(n[0] for n in needs), max(n[1] for n in needs), HALVES)], 2**40)
    launch = Launch(
        rank, world_size, place.arena.slot(name, HALVES), place.faults, place.faults.number(name), PATIENCE_NS
    )
    alike = torch.Generator(device).manual_seed(columns)
    weight = torch.randn(columns, device=device, generator=alike).bfloat16()
    found: dict[str, Call] = {}
    for tokens, p in shapes:
        product = torch.randn(tokens, columns, device=device).bfloat16()
        residual = torch.randn(tokens, columns, device=device, generator=alike).bfloat16()
        kind = f"{'two' if p.two_shot else 'one'}-shot {tokens}"
        found[f"{kind} norm"] = lambda x=product, r=residual, p=p: small_message.all_reduce_norm(
            x, r, weight, EPS, launch, p
        )
        found[kind] = lambda x=product, p=p: (small_message.all_reduce(x, launch, p),)
        total = product.float()
        dist.all_reduce(total)
        added = total + residual.float()
        normed = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
        for call, expected in ((found[f"{kind} norm"], (normed, added)), (found[kind], (total,))):
            for f, e in zip(call(), expected, strict=True):
                off = float((f.float() - e).abs().max() / e.abs().max())
                assert off < 2e-2, f"{kind} of {columns} columns is off by {off:.3g}"
    return found, launch


def stress(rank: int, calls: dict[str, Call], count: int) -> dict[str, int]:
    """Make calls in a random order, which is the same on all ranks, with different delays on each rank. Returns
    ``{call: number of wrong results}`` for the calls that gave wrong results."""
    order, late = random.Random(0), random.Random(rank)
    first = {name: call() for name, call in calls.items()}
    wrong = {name: torch.zeros(1, dtype=torch.int64, device="cuda") for name in calls}
    for _ in range(count):
        name = order.choice(list(calls))
        if late.random() < 0.1:
            torch.cuda._sleep(late.randrange(200_000))
        for f, e in zip(calls[name](), first[name], strict=True):
            wrong[name] += (f.view(torch.int16) != e.view(torch.int16)).any()
    torch.cuda.synchronize()
    return {name: int(n) for name, n in wrong.items() if int(n)}


def graphs(calls: dict[str, Call], replays: int) -> dict[str, int]:
    """Capture two graphs of seven calls each, and replay them alternately. One eager call follows each replay. Returns
    ``{"graphs": number of wrong results}``, or ``{}`` if all results are right."""
    names = list(calls)[:7]
    first = {name: calls[name]() for name in names}
    captured = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = {name: calls[name]() for name in names}
        captured.append((graph, outputs))
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for i in range(replays):
        graph, outputs = captured[i % 2]
        for output in outputs.values():
            output[0].fill_(float("nan"))
        graph.replay()
        for name in names:
            wrong += (outputs[name][0] != first[name][0]).any()
        wrong += (calls[names[i % 7]]()[0] != first[names[i % 7]][0]).any()
    torch.cuda.synchronize()
    return {"graphs": int(wrong)} if int(wrong) else {}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=6000)
    parser.add_argument("--replays", type=int, default=300)
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    failed = 0
    for columns in (8192, 5128):
        calls, launch = calls_of_one_slot(rank, world_size, columns)
        dist.barrier()
        for name in ("stress", "graphs"):
            start = time.monotonic()
            wrong = stress(rank, calls, arguments.calls) if name == "stress" else graphs(calls, arguments.replays)
            launch.faults.check()
            failed += bool(wrong)
            if rank == 0 or wrong:
                row = {
                    "check": name,
                    "columns": columns,
                    "rank": rank,
                    "world_size": world_size,
                    "wrong": wrong,
                    "ok": not wrong,
                    "s": round(time.monotonic() - start, 1),
                }
                print(json.dumps(row), flush=True)
            dist.barrier()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

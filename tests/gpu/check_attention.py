# SPDX-License-Identifier: Apache-2.0
"""Checks attention after gathers of keys and values, with CUDA's attention ops and NCCL.

    torchrun --nproc-per-node 2 -m tests.gpu.check_attention --bench

Each rank has its own GPU. ``--bench`` also times one layer with and without overlap. Rank 0 prints one line for
each case, another rank only for the cases in which it found a problem. The exit status is 1 if

- an output is too far from the result in fp64;
- a site is not overlapped;
- a graph does not call the case's attention op.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from tests.support.context_parallel import LAYERS
from tests.support.context_parallel import all_queries
from tests.support.context_parallel import exact
from tests.support.context_parallel import heads_first
from tests.support.context_parallel import mask_of
from tests.support.context_parallel import stacked
from tests.support.context_parallel import tokens_first

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OWN, WIDTH, HEADS, BATCH = 96, 64, 4, 2
Layer = Callable[..., torch.Tensor]


def cases() -> list[tuple[str, str, Layer, torch.dtype, int]]:
    """``(backend, mask, layer, dtype, tokens of one rank)``. Memory-efficient attention pads log-sum-exps to a multiple
    of 32. So some of its cases have 80 tokens on each rank, which is not a multiple of 32."""
    found: list[tuple[str, str, Layer, torch.dtype, int]] = [
        (backend, "none", layer, torch.bfloat16, OWN) for backend in BACKENDS for layer in LAYERS
    ]
    for layer in (heads_first, tokens_first, stacked):
        found += [("efficient", mask, layer, torch.float16, 80) for mask in ("causal", "random", "heads", "nothing")]
    found += [("efficient", "is_causal", layer, torch.float32, 80) for layer in (heads_first, all_queries)]
    return found


def check(rank: int, world_size: int, backend: str, mask: str, layer: Layer, dtype: torch.dtype, own: int) -> list[str]:
    """The problems of one case on this rank."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, HEADS, own, WIDTH)
    every = [[torch.randn(shape, generator=generator).to(dtype).cuda() for _ in range(3)] for _ in range(world_size)]
    torch.manual_seed(rank)
    wide = layer is all_queries
    rows = own * (world_size if wide else 1)
    hidden: Any = mask_of(mask, 0 if wide else rank, HEADS, rows, own * world_size)
    if isinstance(hidden, torch.Tensor):
        hidden = (hidden.to(dtype) if hidden.is_floating_point() else hidden).cuda()
    queries, keys, values = (torch.cat([parts[i] for parts in every], 2) for i in range(3))
    expected = exact(queries if wide else every[rank][0], keys, values, hidden)
    turned = layer is tokens_first
    inputs = [x.transpose(1, 2).contiguous() if turned else x for x in every[rank]]
    torch._dynamo.reset()
    with torch.no_grad(), sdpa_kernel(BACKENDS[backend]), overlap_inductor.overlap(schedule="ring"):
        result = torch.compile(layer, dynamic=False)(*inputs, hidden)
    report = overlap_inductor.last_report()
    found = [(s.facts.pattern, s.decision.status) for s in report.sites] if report else []
    problems = [] if ("all_gather_attention", "overlapped") in found else [f"not overlapped: {report}"]
    if report and f"_scaled_dot_product_{backend}_attention" not in report.after:
        calls = sorted({word for word in report.after.split() if "attention" in word or "softmax" in word})
        problems.append(f"the graph does not call {backend} attention: {calls}")
    error = (result.transpose(1, 2) if turned else result).double().sub(expected).abs().max().item()
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 5e-3}[dtype]
    return problems if error <= tolerance else [*problems, f"error {error:.3g}"]


def bench(rank: int, world_size: int) -> dict[str, Any]:
    """Microseconds of ``heads_first`` without overlap (``keep``) and with it (``ring``), on the slowest rank: flash
    attention with 32 heads and 32768 keys."""
    inputs = [torch.randn(1, 32, 32768 // world_size, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    times = {}
    for name in ("keep", "ring"):
        torch._dynamo.reset()
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), overlap_inductor.overlap(schedule=name):
            compiled = torch.compile(heads_first, dynamic=False)
            samples = []
            for _ in range(13):
                dist.barrier()
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                compiled(*inputs)
                end.record()
                end.synchronize()
                samples.append(start.elapsed_time(end) * 1e3)
        median = torch.tensor(statistics.median(samples[3:]), device="cuda")
        dist.all_reduce(median, dist.ReduceOp.MAX)
        times[name] = round(median.item(), 1)
    return {"pattern": "all_gather_attention", "world_size": world_size, "keys": 32768, **times}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.check_attention")
    parser.add_argument("--bench", action="store_true", help="time flash attention to 32768 keys")
    options = parser.parse_args()
    rank, world_size = start_rank()
    # Without caches, no case gets code that was compiled for another attention backend. The keys of torch.compile's
    # caches do not include this backend.
    torch.compiler.config.force_disable_caches = True
    failed = 0
    for backend, mask, layer, dtype, own in cases():
        problems = check(rank, world_size, backend, mask, layer, dtype, own)
        failed += len(problems)
        if rank == 0 or problems:
            text = f"{backend} {mask} {layer.__name__} {dtype} {own}"
            print(f"rank {rank} of {world_size}, {text}: {problems or 'ok'}", flush=True)
    if options.bench:
        row = bench(rank, world_size)
        if rank == 0:
            print(json.dumps(row), flush=True)
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

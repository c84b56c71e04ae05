# SPDX-License-Identifier: Apache-2.0
"""Checks torch's context parallelism: NCCL moves keys and values while each rank attends to the block that it holds.

    torchrun --nproc-per-node 2 -m tests.gpu.check_rotated_attention --bench

Each rank has a GPU. ``--bench`` also times attention with and without overlap. Prints one line for each case. The exit
status is 1 if an output or a gradient is wrong, or if a site is not overlapped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report.publish import all_reports
from tests.support.context_parallel import exact
from tests.support.rotated_attention import places
from tests.support.rotated_attention import rotation

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
METHODS = ("alltoall", "allgather")
OWN = 128
"""Tokens of a rank. With balanced load, a rank also attends with half of its queries. Half of ``OWN`` is a multiple of
32, so memory-efficient attention pads no queries."""


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 1, k * 1, v * 1, is_causal=causal)


@contextmanager
def sharded(whole: list[torch.Tensor], method: str, causal: bool, backend: str) -> Iterator[list[torch.Tensor]]:
    """Enter torch's context parallelism and yield this rank's shards of ``whole``. If ``causal``, the load is
    balanced."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [x.clone() for x in whole]
    with rotation(method, causal), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        with sdpa_kernel(BACKENDS[backend]):
            yield [x.detach().clone() for x in buffers]


def check(rank: int, ranks: int, method: str, causal: bool, backend: str, train: bool) -> list[str]:
    """The problems of one case on this rank."""
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn((2, 4, OWN * ranks, 64), generator=generator).bfloat16().cuda() for _ in range(3)]
    mine = places(rank, ranks, OWN, causal).cuda()
    mask = mine[:, None] >= torch.arange(OWN * ranks, device="cuda") if causal else None
    expected = exact(whole[0][:, :, mine], whole[1], whole[2], mask)
    torch._dynamo.reset()
    before = len(all_reports())
    with sharded(whole, method, causal, backend) as own, overlap_inductor.overlap(schedule="early_start"):
        own = [x.requires_grad_(train) for x in own]
        result = torch.compile(layer, dynamic=False, fullgraph=True)(*own, causal)
        grads = torch.autograd.grad(result.float().sum(), own) if train else ()
        plain = torch.autograd.grad(layer(*own, causal).float().sum(), own) if train else ()
    found = [s.decision.status for r in all_reports()[before:] for s in r.sites]
    problems = [] if found and set(found) == {"overlapped"} else [f"sites: {found}"]
    error = result.detach().double().sub(expected).abs().max().item()
    problems += [] if error <= 3e-2 else [f"error {error:.3g}"]
    differ = float(torch.tensor([0.0, *((a - b).abs().max() for a, b in zip(grads, plain, strict=True))]).max())
    return problems if differ <= 5e-2 else [*problems, f"gradients differ by {differ:.3g}"]


def bench(ranks: int, method: str, causal: bool) -> dict[str, Any]:
    """Microseconds of flash attention with 32 heads and 32768 keys, without overlap (``keep``) and with it, on the
    slowest rank."""
    whole = [torch.randn(1, 32, 32768, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    calls, samples = {}, {}
    for name in ("keep", "early_start"):
        torch._dynamo.reset()
        with sharded(whole, method, causal, "flash") as own, overlap_inductor.overlap(schedule=name), torch.no_grad():
            calls[name] = torch.compile(layer, dynamic=False, fullgraph=True)
            found = []
            for _ in range(23):
                dist.barrier()
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                calls[name](*own, causal)
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) * 1e3)
        median = torch.tensor(statistics.median(found[3:]), device="cuda")
        dist.all_reduce(median, dist.ReduceOp.MAX)
        samples[name] = round(median.item(), 1)
    return {"method": method, "causal": causal, "world_size": ranks, "keys": 32768, **samples}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.check_rotated_attention")
    parser.add_argument("--bench", action="store_true", help="time flash attention to 32768 keys")
    options = parser.parse_args()
    rank, ranks = start_rank()
    torch.compiler.config.force_disable_caches = True
    failed = 0
    cases = [(method, causal, name, False) for method in METHODS for causal in (False, True) for name in BACKENDS]
    for case in [*cases, ("alltoall", True, "flash", True)]:
        problems = check(rank, ranks, *case)
        failed += len(problems)
        if rank == 0 or problems:
            print(f"rank {rank} of {ranks}, {case}: {problems or 'ok'}", flush=True)
    for method in METHODS if options.bench else ():
        for causal in (False, True):
            row = bench(ranks, method, causal)
            if rank == 0:
                print(json.dumps(row), flush=True)
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

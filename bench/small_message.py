# SPDX-License-Identifier: Apache-2.0
"""Time schedule ``small_message`` against ``keep``: llama3-70b's down-projection in decode, with its all-reduce,
residual add and RMSNorm.

    torchrun --nproc-per-node 4 -m bench.small_message [--tokens 1 8 16 64 128] [--seconds 80] \\
        --out bench/results/small_message.jsonl

``keep`` runs ``torch.mm``, NCCL's all-reduce, and one Inductor kernel for residual and norm. Before and after the
timing, results are compared with fp32 on random data. A setting of ``small_message`` (``variants``) is not timed if
its first results are wrong. All ranks' results must be bitwise equal, except for ``keep``, whose norm each rank tunes
by itself.

The providers are ``keep``, the settings of ``small_message``, and parts of their work (``Site.parts``). Each
round times each of them once. A row's time is the median over rounds, then the maximum over ranks, in microseconds
for one call::

    us                         one call after a device sleep that hides the host (bench.timing)
    graph_us                   one call in a captured CUDA graph of 20 calls
    speedup, graph_speedup     these times of keep, divided by those of the provider, in the same run
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import triton

from bench.timing import greatest
from bench.timing import timed
from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import WorkspaceArena
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric

COLUMNS, INNER, EPS = 8192, 28672, 1e-5
CALLS = 20
PATIENCE_NS = 30_000_000_000
"""Patience of the kernels' waits. At the first call, ranks finish compiling seconds apart."""
TOLERANCE = 2e-2
SEGMENTS = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16))
"""Columns and warps of a block."""


def variants(world_size: int, tokens: int) -> dict[str, SmallParameters]:
    planned = small_plan.settings_for(world_size, tokens, COLUMNS, 2)
    found = {"planned": SmallParameters(**planned)}
    for two_shot in (False, True) if world_size > 2 else (False,):
        # One-shot sends all tokens to each peer. It is left out if a rank would send more than 448 rows in all.
        if two_shot or tokens * (world_size - 1) <= 448:
            for segment, warps in SEGMENTS:
                if COLUMNS // segment * world_size <= 32 * warps:
                    found[f"{'two' if two_shot else 'one'}-shot {segment} w{warps}"] = SmallParameters(
                        two_shot, segment, warps
                    )
    return found


class Site:
    def __init__(self, tokens: int, arena: WorkspaceArena, faults: FaultRecord) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.tokens, self.world_size = tokens, world_size
        self.parameters = variants(world_size, tokens)
        inner = INNER // world_size
        self.a = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) / 4
        self.b = (torch.randn(COLUMNS, inner, device="cuda", dtype=torch.bfloat16) / 16).t()
        shared = torch.Generator(device="cuda").manual_seed(tokens)
        self.residual, self.weight = (
            torch.randn(*s, device="cuda", generator=shared).bfloat16() for s in ((tokens, COLUMNS), (COLUMNS,))
        )
        needs = [small_plan.needed(p, world_size, tokens, COLUMNS, 2) for p in self.parameters.values()]
        name = f"decode {tokens}"
        arena.prepare([Request(name, max(n[0] for n in needs), max(n[1] for n in needs), HALVES)])
        self.launch = Launch(rank, world_size, arena.slot(name, HALVES), faults, faults.number(name), PATIENCE_NS)
        # A compiled model computes residual and norm in one kernel. So does this function.
        self.add_and_norm = torch.compile(self._add_and_norm, dynamic=False)

    def _add_and_norm(
        self, summed: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        added = residual + summed
        return reference.rms_norm(added, weight, EPS), added

    def keep(self) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.mm(self.a, self.b)
        dist.all_reduce(product)
        return self.add_and_norm(product, self.residual, self.weight)

    def small(self, parameters: SmallParameters) -> tuple[torch.Tensor, torch.Tensor]:
        return small_message.matmul_all_reduce_norm(
            self.a, self.b, None, self.residual, self.weight, EPS, self.launch, parameters
        )

    def parts(self) -> dict[str, Callable[[], Any]]:
        product = torch.mm(self.a, self.b)
        # The sum is in place, so values other than zero would grow from call to call.
        zeros = torch.zeros_like(product)
        planned = self.parameters["planned"]
        return {
            "matmul": lambda: torch.mm(self.a, self.b),
            "all-reduce": lambda: dist.all_reduce(zeros),
            "norm": lambda: self.add_and_norm(product, self.residual, self.weight),
            "planned without matmul": lambda: small_message.all_reduce_norm(
                product, self.residual, self.weight, EPS, self.launch, planned
            ),
            "planned sum without matmul": lambda: small_message.all_reduce(product, self.launch, planned),
        }

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.a.float() @ self.b.float()
        dist.all_reduce(total)
        added = total + self.residual.float()
        return added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + EPS) * self.weight.float(), added


def error(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], alike: bool) -> float:
    """The largest relative error on any rank. Infinite for NaN and, with ``alike``, if ranks' results have different
    checksums."""
    off = float(
        torch.stack([(f.float() - e).abs().max() / e.abs().max() for f, e in zip(found, expected, strict=True)]).max()
    )
    bits = torch.stack([f.view(torch.int16).long().sum() for f in found])
    least, most = bits.clone(), bits.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return greatest(float("inf") if alike and not torch.equal(least, most) else off)


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    return graph.replay


def measure(site: Site, repeats: int) -> list[dict[str, Any]]:
    expected = site.expected()
    providers: dict[str, Callable[[], Any]] = {"keep": site.keep}
    providers |= {name: lambda p=p: site.small(p) for name, p in site.parameters.items()}
    errors = {}
    for name, function in list(providers.items()):
        # Three calls use both halves of the workspace, and then the first half again.
        found = [function() for _ in range(3)]
        errors[name] = max(error(f, expected, name != "keep") for f in found)
        gave_up = greatest(float(site.launch.faults.error() is not None))
        if gave_up:
            site.launch.faults.check()
            raise RuntimeError(f"{name} gave up waiting on another rank")
        if errors[name] > TOLERANCE and name != "keep":
            del providers[name]
    right = dict(providers)
    providers |= site.parts()
    for function in providers.values():
        function()
    torch.cuda.synchronize()
    graphs = {name: captured(function) for name, function in providers.items()}
    for replay in graphs.values():
        replay()
    torch.cuda.synchronize()
    single, many = timed(providers, repeats), timed(graphs, max(repeats // 3, 3))
    for name, function in right.items():
        errors[name] = max(errors[name], error(function(), expected, name != "keep"))
    rows = []
    us = {name: greatest(statistics.median(s)) for name, s in single.items()}
    graph_us = {name: greatest(statistics.median(s)) / CALLS for name, s in many.items()}
    for name in [*errors, *site.parts()]:
        row: dict[str, Any] = {"provider": name, "error": errors.get(name), "right": errors.get(name, 0.0) <= TOLERANCE}
        if name in us:
            row |= {"us": round(us[name], 1), "graph_us": round(graph_us[name], 1)}
            row |= {
                "speedup": round(us["keep"] / us[name], 3),
                "graph_speedup": round(graph_us["keep"] / graph_us[name], 3),
            }
        rows.append(row | ({"parameters": asdict(site.parameters[name])} if name in site.parameters else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1, 16, 8, 64])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=75, help="begin no token count after this many seconds")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    faults = FaultRecord.of(dist.group.WORLD.group_name, range(world_size), device)
    arena = WorkspaceArena(
        world_size,
        device,
        lambda n, dtype: symmetric.allocate(n, dtype, device, dist.group.WORLD),
        torch.cuda.is_current_stream_capturing,
        2**34,
    )
    environment = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(),
        "world_size": world_size,
    }
    for tokens in arguments.tokens:
        # Rank 0's clock decides for all ranks.
        if greatest(time.monotonic() - start if rank == 0 else 0.0) > arguments.seconds:
            break
        site = Site(tokens, arena, faults)
        rows = measure(site, arguments.repeats)
        if rank == 0:
            best = min((r for r in rows if "parameters" in r and r["right"]), key=lambda r: r["graph_us"], default=None)
            print(
                json.dumps(
                    {
                        "tokens": tokens,
                        "world_size": world_size,
                        "s": round(time.monotonic() - start, 1),
                        "best": best and best["provider"],
                    }
                ),
                flush=True,
            )
            for row in rows:
                print(json.dumps({"tokens": tokens, **row}), flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.writelines(json.dumps({"tokens": tokens, **row, **environment}) + "\n" for row in rows)
        # ``measure`` has already dropped the graphs. The site's tensors may be freed once the GPU has no work left.
        torch.cuda.synchronize()
        del site
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fused kernels against ``keep``, async TP's op and the bounds: llama3-70b MLP and attention projections, one torchrun for everything. The sites and their timing
serve every schedule that is one op a site (``bench.operators``).

    torchrun --nproc-per-node 4 -m bench.fused --tokens 1024 4096 --out bench/results/fused.jsonl

Every provider is compared with fp32 on random data before it is timed. Providers are timed in turn, round after round; the host is hidden behind
a device sleep. Median microseconds, maximum over ranks; ``speedup`` is over ``keep`` of the same run, ``ratio`` over max(matmul, collective).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import chunked
from overlap_inductor.lowerings import fused
from overlap_inductor.lowerings.chunked_plan import ChunkedParameters
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.vendor_matmul import Scales
from overlap_inductor.lowerings.vendor_matmul import VendorMatmul
from overlap_inductor.transports.arena import Request
from overlap_inductor.transports.arena import WorkspaceArena
from overlap_inductor.transports.faults import FaultRecord
from overlap_inductor.transports.workspace import Launch

SHAPES = {"mlp": (8192, 28672), "qkv_o": (8192, 10240)}
"""``(hidden, wide)``: gathered against ``[hidden, wide / W]``, scattered from ``[wide / W, hidden]``."""
SLEEP_CYCLES = 6_000_000
PATIENCE_NS = 2_000_000_000
SIGNALS = 32


SHAPES_OF_TILES: dict[str, dict[str, Any]] = {"s3": {}, "s4h": {"stages": 4, "halves": True}, "n128": {"block_n": 128, "stages": 4}}


def variants(pattern: str, blocks: int, tokens: int) -> dict[str, FusedParameters]:
    """The parameters to try, by name; narrow tiles only where there are few."""
    tiles = {k: v for k, v in SHAPES_OF_TILES.items() if k != "n128" or tokens <= 2048}
    found = {}
    for (name, shape), parts in itertools.product(tiles.items(), (1, 2, 4)):
        if pattern == "all_gather_matmul":
            for pushers in (8, 12):
                found[f"fused p{pushers} parts{parts} {name}"] = FusedParameters(blocks, parts=parts, pushers=pushers, **shape)
        else:
            found[f"fused parts{parts} {name}"] = FusedParameters(blocks, parts=parts, stagger_ns=150, **shape)
    return found


class Site:
    """One pattern at one size: operands, workspace, and what each provider runs. ``dtype``: ``bf16``, or ``fp8`` with a scale an operand, ``fp8_rows`` with one a
    row and column."""

    def __init__(
        self, pattern: str, tokens: int, shape: tuple[int, int], rank: int, world_size: int, arena: WorkspaceArena, faults: FaultRecord, dtype: str = "bf16"
    ) -> None:
        hidden, wide = shape
        self.pattern, self.group, self.world_size = pattern, dist.group.WORLD, world_size
        self.rows = tokens // world_size
        gathers = pattern == "all_gather_matmul"
        inner, columns = (hidden, wide // world_size) if gathers else (wide // world_size, hidden)
        self.a = torch.randn(self.rows if gathers else tokens, inner, device="cuda", dtype=torch.bfloat16) / 4
        self.weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) / 16
        self.scales = None
        if dtype != "bf16":
            self.a, self.weight = self.a.to(torch.float8_e4m3fn), self.weight.to(torch.float8_e4m3fn)
            scales = (torch.rand(shape, device="cuda") + 0.5 for shape in (((tokens, 1), (1, columns)) if dtype == "fp8_rows" else ((), ())))
            self.scales = Scales(*scales, torch.bfloat16, fast=True)
        self.b = self.weight.t()
        self.vendor = VendorMatmul(self.b, None, self.scales)
        self.gathered = torch.empty(tokens, inner, device="cuda", dtype=self.a.dtype) if gathers else self.a
        self.product = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
        self.scattered = torch.empty(self.rows, columns, device="cuda", dtype=torch.bfloat16)
        name = f"{pattern} {tokens} {shape} {dtype}"
        needed = tokens * (inner * self.a.itemsize if gathers else columns * 2)
        arena.prepare([Request(name, needed * (2 if pattern == "matmul_all_reduce" else 1), SIGNALS)])
        self.launch = Launch(rank, world_size, arena.slot(name), faults, faults.number(name), PATIENCE_NS)

    def matmul(self) -> torch.Tensor:
        self.vendor(self.gathered, 0, len(self.product), self.product)
        return self.product

    def collective(self) -> torch.Tensor:
        if self.pattern == "all_gather_matmul":
            dist.all_gather_into_tensor(self.gathered.view(torch.uint8), self.a.view(torch.uint8))
            return self.gathered
        if self.pattern == "matmul_reduce_scatter":
            dist.reduce_scatter_tensor(self.scattered, self.product)
            return self.scattered
        dist.all_reduce(self.product)
        return self.product

    def keep(self) -> torch.Tensor:
        if self.pattern == "all_gather_matmul":
            self.collective()
            return self.matmul()
        self.matmul()
        return self.collective()

    def async_tp(self) -> torch.Tensor:
        name = self.group.group_name
        if self.pattern == "all_gather_matmul":
            return torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, name)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, name)

    def run(self, parameters: FusedParameters | ChunkedParameters) -> torch.Tensor:
        if isinstance(parameters, FusedParameters):
            return getattr(fused, self.pattern)(self.a, self.b, self.launch, parameters)
        if self.pattern == "all_gather_matmul":
            return chunked.all_gather_matmul(self.a, [self.vendor], self.launch, parameters)[0]
        return getattr(chunked, self.pattern)(self.a, self.vendor, self.launch, parameters)

    def expected(self) -> torch.Tensor:
        """In fp32, from inputs exchanged by NCCL."""
        if self.pattern == "all_gather_matmul":
            self.collective()
        product = self.gathered.float() @ self.b.float()
        if self.scales is not None:
            product *= self.scales.a * self.scales.b
        if self.pattern == "all_gather_matmul":
            return product
        dist.all_reduce(product)
        rank = self.launch.rank
        return product if self.pattern == "matmul_all_reduce" else product[rank * self.rows : (rank + 1) * self.rows]


def _worst(value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> float:
    tensor = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return float(tensor)


def timed(providers: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in providers}
    marker = torch.zeros(1, device="cuda")
    for _ in range(repeats):
        for name, function in providers.items():
            torch.cuda._sleep(SLEEP_CYCLES)
            # Behind the sleep: clocks differ, so that GPUs that sleep equally long come tens of microseconds apart.
            dist.all_reduce(marker)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3)
    return samples


def host_us(function: Callable[[], Any], calls: int = 10) -> float:
    """Microseconds of the host for a call, beside a GPU that is busy. (Few calls: a full queue of launches would stop the host.)"""
    best = float("inf")
    for _ in range(3):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * SLEEP_CYCLES)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return best


def measure(site: Site, repeats: int, settings: Mapping[str, FusedParameters | ChunkedParameters]) -> list[dict[str, Any]]:
    """Rows of ``keep``, async TP and the parameters to try, each right or said to be wrong."""
    expected = site.expected()
    bound = expected.abs().max()
    providers: dict[str, Callable[[], Any]] = {"keep": site.keep}
    if site.pattern != "matmul_all_reduce" and site.scales is None:
        providers["async_tp"] = site.async_tp
    for name, parameters in settings.items():
        providers[name] = lambda p=parameters: site.run(p)
    errors = {}
    for name, function in list(providers.items()):
        # Loaded by every rank before any rank's timing, and twice: the second call meets what the first has left.
        for _ in range(2):
            found = function()
        torch.cuda.synchronize()
        errors[name] = _worst(float((found.float() - expected).abs().max() / bound))
        if _worst(float(site.launch.faults.record[0])):
            site.launch.faults.check()
            raise RuntimeError(f"{site.pattern}: {name} gave up waiting on another rank")
        if errors[name] > 2e-2:
            del providers[name]
    del expected
    providers |= {"matmul": site.matmul, "collective": site.collective}
    samples = timed(providers, repeats)
    host = {name: _worst(host_us(providers[name])) for name in errors if name in providers}
    times = {name: _worst(statistics.median(s)) for name, s in samples.items()}
    limit = max(times["matmul"], times["collective"])
    rows = []
    for name in [*errors, "matmul", "collective"]:
        row: dict[str, Any] = {"provider": name, "error": errors.get(name), "right": errors.get(name, 0.0) <= 2e-2}
        if name in times:
            quantiles = statistics.quantiles(samples[name], n=5)
            row |= {"us": round(times[name], 1), "p20": round(quantiles[0], 1), "p80": round(quantiles[-1], 1)}
            row |= {"speedup": round(times["keep"] / times[name], 3), "ratio": round(times[name] / limit, 3)}
            row |= {"host_us": round(host[name], 1)} if name in host else {}
        rows.append(row | ({"parameters": asdict(settings[name])} if name in settings else {}))
    return rows


if __name__ == "__main__":
    from bench.operators import main

    main()

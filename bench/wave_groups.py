# SPDX-License-Identifier: Apache-2.0
"""Time schedule ``wave_groups`` against ``keep``, and its planned partition against others, on llama3-70b's MLP.

A *partition* divides the matmul's waves into groups. A group's collective starts when the group's waves and the
previous group's collective have ended.

    torchrun --nproc-per-node 4 -m bench.wave_groups --tokens 4096 8192 --out bench/results/wave_groups.jsonl
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 4 -m bench.wave_groups

Before the timing, results are compared with fp32 on random data. A *provider* is a way to compute a site or a part of
it. Providers are timed in rounds. Each round has one call of every provider.
A site's rows, by provider::

    keep          the matmul, then the collective. ``bound``: this call's time divided by the time of the longer of the
                  two
    wave_groups   the call with the plan's partition and the plan's number of SMs left free for NCCL
    free N        a call that leaves N SMs free for NCCL, with the partition that is predicted to be best for N
    matmul        the matmul alone
    collective    the collective alone
    partitions    the planned partition against at most ``--candidates`` others: equal groups, then random ones. The
                  planned one and the three fastest others are timed again. ``within``: the planned one's time divided
                  by the shortest of these times
    timeline      microseconds from the call's start to the end of the matmul and of each group's collective. If all
                  collectives end after the matmul, NCCL's blocks found no room beside it
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from bench.shapes import SHAPES
from bench.shapes import Layer
from bench.timing import greatest
from bench.timing import timed
from overlap_inductor.lowerings.wave_groups import launch as wave_groups
from overlap_inductor.lowerings.wave_groups.parameters import MAX_GROUPS
from overlap_inductor.lowerings.wave_groups.parameters import WaveParameters
from overlap_inductor.lowerings.wave_groups.parameters import Waves
from overlap_inductor.lowerings.wave_groups.parameters import best_partition
from overlap_inductor.lowerings.wave_groups.parameters import cuts
from overlap_inductor.lowerings.wave_groups.parameters import partitions
from overlap_inductor.lowerings.wave_groups.parameters import predicted
from overlap_inductor.transports.nccl import Nccl

PATTERNS = ("matmul_all_reduce", "matmul_reduce_scatter")


class Site:
    def __init__(self, pattern: str, tokens: int, layer: Layer, parameters: WaveParameters) -> None:
        self.scatters, self.group = pattern == "matmul_reduce_scatter", dist.group.WORLD
        hidden, inner = layer.hidden, layer.narrow // self.group.size()
        self.a = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) / 4
        self.b = (torch.randn(hidden, inner, device="cuda", dtype=torch.bfloat16) / 16).t()
        self.product = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.shard = torch.empty(tokens // self.group.size(), hidden, device="cuda", dtype=torch.bfloat16)
        waves = wave_groups.waves_of(self.group, self.a.device)
        self.call = wave_groups.Call(
            self.a, self.b, None, self.scatters, False, f"{pattern} {tokens}", parameters, waves
        )

    def matmul(self) -> torch.Tensor:
        return torch.mm(self.a, self.b, out=self.product)

    def collective(self) -> torch.Tensor:
        Nccl().reduce_rows(self.shard if self.scatters else self.product, self.product, self.group)
        return self.shard if self.scatters else self.product

    def keep(self) -> torch.Tensor:
        self.matmul()
        return self.collective()

    def given(self, free: int, partition: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        return functools.partial(
            self.call.run, wave_groups.WavePlan(free, partition, self.call.waves.table(partition), None)
        )

    def expected(self) -> torch.Tensor:
        product = self.a.float() @ self.b.float()
        dist.all_reduce(product)
        return product.chunk(self.group.size())[self.group.rank()] if self.scatters else product


def error_of(function: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    """Call ``function`` twice. Returns the largest error of the second result on any rank, relative to the largest
    element. The second call also shows whether the first call left a wrong state."""
    function()
    return greatest(float((function().float() - expected).abs().max() / expected.abs().max()))


def medians(providers: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    return {name: greatest(statistics.median(samples)) for name, samples in timed(providers, repeats).items()}


def some_partitions(waves: Waves, count: int) -> list[tuple[int, ...]]:
    """``count`` partitions, first those with equal groups, then random ones. All partitions, if there are at most
    ``count``."""
    first, *inner, last = cuts(waves)
    if 2 ** len(inner) <= count:
        return list(partitions(waves))
    chance = random.Random(0)
    equal = [
        (first, *(inner[len(inner) * i // groups] for i in range(1, groups)), last)
        for groups in range(1, min(MAX_GROUPS, len(inner)) + 1)
    ]
    found = dict.fromkeys(equal)
    while len(found) < count:
        groups = chance.randrange(min(MAX_GROUPS, len(inner) + 1))
        found[(first, *sorted(chance.sample(inner, groups)), last)] = None
    return list(found)[:count]


def timeline(site: Site, plan: wave_groups.WavePlan) -> dict[str, Any]:
    """The times at which the matmul and each collective of one call ended."""
    begin, matmul = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ends: list[torch.cuda.Event] = []
    multiply, reduce_rows = wave_groups.Call.multiply, Nccl.reduce_rows

    def multiply_and_record(*arguments: Any) -> torch.Tensor:
        begin.record()
        c = multiply(*arguments)
        matmul.record()
        return c

    def reduce_and_record(*arguments: Any) -> None:
        reduce_rows(*arguments)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()

    wave_groups.Call.multiply, Nccl.reduce_rows = multiply_and_record, reduce_and_record  # type: ignore[method-assign]
    try:
        timed({"": lambda: (ends.clear(), site.call.run(plan))}, 2)
    finally:
        wave_groups.Call.multiply, Nccl.reduce_rows = multiply, reduce_rows  # type: ignore[method-assign]
    return {
        "matmul_us": round(begin.elapsed_time(matmul) * 1e3),
        "collectives_us": [round(begin.elapsed_time(e) * 1e3) for e in ends],
    }


def measure(site: Site, repeats: int, candidates: int) -> list[dict[str, Any]]:
    call, expected = site.call, site.expected()
    plan = call.plan()
    curve, whole = call.waves.curve(call.transport, site.scatters, site.a), call.waves.table((0, call.bands))
    falling = sorted(call.parameters.free, reverse=True)
    alone = call.first_rank_seconds([functools.partial(call.alone, free, whole) for free in falling])
    chosen = {free: best_partition(call.as_waves(free, seconds), curve) for free, seconds in zip(falling, alone)}
    providers: dict[str, Callable[[], Any]] = {"keep": site.keep, "wave_groups": functools.partial(call.run, plan)}
    providers |= {f"free {free}": site.given(free, partition) for free, partition in chosen.items()}
    errors = {name: error_of(function, expected) for name, function in providers.items()}
    waves = call.as_waves(plan.free, dict(zip(falling, alone))[plan.free])
    tried = {
        partition: site.given(plan.free, partition)
        for partition in some_partitions(waves, candidates)
        if partition != plan.partition
    }
    partition_errors = [error_of(function, expected) for function in tried.values()]
    del expected
    providers = {name: f for name, f in providers.items() if errors[name] <= 2e-2} | {
        "matmul": site.matmul,
        "collective": site.collective,
    }
    times = medians(providers, repeats)
    rows: list[dict[str, Any]] = []
    for name in [*errors, "matmul", "collective"]:
        row: dict[str, Any] = {"provider": name, "error": errors.get(name), "right": errors.get(name, 0.0) <= 2e-2}
        if name in times:
            row |= {"us": round(times[name], 1), "speedup": round(times["keep"] / times[name], 3)}
        if name == "keep":
            row["bound"] = round(times["keep"] / max(times["matmul"], times["collective"]), 3)
        if name.startswith("free"):
            free = int(name.split()[1])
            seconds = predicted(chosen[free], call.as_waves(free, dict(zip(falling, alone))[free]), curve)
            row |= {
                "partition": chosen[free],
                "predicted_us": round(seconds * 1e6, 1),
                "matmul_alone_us": round(dict(zip(falling, alone))[free] * 1e6, 1),
            }
        if name == "wave_groups":
            row |= {
                "free": plan.free,
                "partition": plan.partition,
                "predicted_us": round((plan.seconds or 0.0) * 1e6, 1),
            }
        rows.append(row)
    rough = medians({str(p): f for p, f in tried.items()}, 3)
    finalists = sorted(tried, key=lambda p: rough[str(p)])[:3]
    final = (
        medians({str(p): tried[p] for p in finalists} | {"planned": providers["wave_groups"]}, repeats)
        if "wave_groups" in providers
        else {}
    )
    if final:
        best = min(final, key=lambda name: final[name])
        row = {
            "provider": "partitions",
            "tried": len(tried) + 1,
            "of": 2 ** (len(cuts(waves)) - 2),
            "right": all(e <= 2e-2 for e in partition_errors),
        }
        rows.append(
            row
            | {
                "best": best,
                "us": round(final[best], 1),
                "planned_us": round(final["planned"], 1),
                "within": round(final["planned"] / final[best], 3),
            }
        )
    return [*rows, {"provider": "timeline", "right": True, **timeline(site, plan)}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--shapes", nargs="+", default=["llama3-70b-mlp"], choices=list(SHAPES))
    parser.add_argument(
        "--free", type=int, nargs="+", default=list(WaveParameters(1).free), help="SMs to leave to NCCL"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=64, help="largest number of partitions to time")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    properties = torch.cuda.get_device_properties(device)
    parameters = WaveParameters(properties.multi_processor_count, tuple(arguments.free))
    environment = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": properties.name,
        "world_size": dist.get_world_size(),
    }
    environment |= {
        name: os.environ[name]
        for name in os.environ
        if name.startswith("NCCL_") or name == "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    for shape, pattern, tokens in itertools.product(arguments.shapes, arguments.patterns, arguments.tokens):
        rows = measure(Site(pattern, tokens, SHAPES[shape], parameters), arguments.repeats, arguments.candidates)
        if dist.get_rank() == 0:
            lines = [{"pattern": pattern, "shape": shape, "tokens": tokens, **row} for row in rows]
            for line in lines:
                print(json.dumps(line), flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.writelines(json.dumps({**line, **environment}) + "\n" for line in lines)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

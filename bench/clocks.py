# SPDX-License-Identifier: Apache-2.0
"""Measure the GPU's clock rate while providers run, and scale their times to the highest clock rate.

A provider is one way to compute a case (``bench.providers``). The scaled times show why a provider is slow: either it
waits, or it heats the GPU so that the clock rate falls.

    torchrun --nproc-per-node 4 -m bench.clocks --patterns all_gather_matmul --tokens 8192 \\
        --schedules chunked fused/copy_engine --out rows.jsonl

Large matmuls take a GPU to its power limit. The less the GPU waits, the further its clock rate falls. Each provider
runs in three ways (``bench.timing`` says what hidden and in the loop mean)::

    single      one call, with the host hidden
    row         CALLS calls one after the other, with the host hidden
    compiled    CALLS calls one after the other, with the host in the loop. All providers except async_tp are compiled
                graphs

Around each sample, a kernel stores the SMs' cycle counters and the time (``%clock64``, ``%globaltimer``). Each
provider, and the matmul alone, gets a JSON object for each way. It holds the longest median time and the lowest median
clock rate of any rank. Before the timing, the providers' results are compared with results in fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from bench import rows
from bench.providers import chosen
from bench.providers import kinds_of
from bench.providers import provider_names
from bench.providers import providers
from bench.shapes import Case
from bench.site import TOLERANCE
from bench.site import Site
from bench.timing import Call
from bench.timing import Clock
from bench.timing import worst
from overlap_inductor.passes.patterns import PATTERNS

CALLS = 8
"""Calls of one sample in ways ``row`` and ``compiled``."""
BLOCKS_AN_SM = 4
"""Blocks of ``_stamp`` for each SM. So many blocks make it likely that every SM runs at least one."""


@triton.jit
def _stamp(out):
    """Each block stores ``(cycles, nanoseconds)`` of its SM into row ``%smid`` of ``out [SMs, 2]``. Blocks on one SM
    overwrite each other's values, which are nearly equal."""
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [0], dtype=tl.int64, is_pure=False, pack=1)
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [0], dtype=tl.int64, is_pure=False, pack=1)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + sm * 2, cycles)
    tl.store(out + sm * 2 + 1, now)


class StampedClock(Clock):
    """A clock that also measures the GPU's clock rate. ``mhz``: the rate during the last sample, the median over
    SMs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.stamps = torch.zeros(2, self.sms, 2, dtype=torch.int64, device=device)
        self._next = 0

    def mark(self) -> torch.cuda.Event:
        event = super().mark()
        _stamp[(self.sms * BLOCKS_AN_SM,)](self.stamps[self._next], num_warps=1)
        self._next = 1 - self._next
        return event

    @property
    def mhz(self) -> float:
        begin, end = self.stamps.double()
        both = (begin[:, 1] > 0) & (end[:, 1] > 0)
        cycles, nanoseconds = (end - begin)[both].unbind(1)
        return float((cycles / nanoseconds).median() * 1e3)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.clocks", description=(__doc__ or "").splitlines()[0])
    patterns, offered = [p.name for p in PATTERNS if p.example is not None], provider_names()
    parser.add_argument("--patterns", nargs="+", default=patterns, choices=patterns)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["fused", "chunked/copy_engine"],
        choices=[*kinds_of(offered), *offered],
        metavar="SCHEDULE",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "clocks.jsonl")
    return parser.parse_args(arguments)


def measured(case: Case, names: Sequence[str], clock: StampedClock, repeats: int) -> list[dict[str, Any]]:
    """For each way, a JSON object for each provider and one for the matmul alone. All ranks call this together. Raises
    ``ValueError`` if a result is wrong."""
    site = Site(case, clock.device)
    expected, names = site.expected(), chosen(names, [], case, clock.device)
    hidden, compiled = (providers(site, names, [], setting, {}) for setting in ("hidden", "compiled"))
    for provider in [*hidden, *compiled]:
        (error,) = worst([site.error(provider.call(), expected)])
        if error > TOLERANCE[case.result]:
            raise ValueError(f"{provider.name} is wrong for {case}: off by {error:.3g} of the largest element")
    found = []
    for way, some, calls in (("single", hidden, 1), ("row", hidden, CALLS), ("compiled", compiled, CALLS)):
        timed: dict[str, Call] = {p.name: p.call for p in some} | {"matmul": site.matmul}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
        for _ in range(repeats + 2):
            for name, call in timed.items():
                us, _ = clock.sample(call, calls, 0.0 if way == "compiled" else 1.0 + calls)
                samples[name].append((us, clock.mhz))
        for name, pairs in samples.items():
            # The first two samples are not counted.
            us, slowest = worst(
                [statistics.median(us for us, _ in pairs[2:]), -statistics.median(mhz for _, mhz in pairs[2:])]
            )
            found.append(
                {
                    "pattern": case.pattern,
                    "tokens": case.tokens,
                    "way": way,
                    "provider": name,
                    "median_us": round(us, 1),
                    "mhz": round(-slowest),
                    "repeats": repeats,
                }
            )
    return found


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    options = parsed(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch.manual_seed(dist.get_rank())
    clock, where = StampedClock(device), rows.environment(device)
    highest = torch.cuda.get_device_properties(device).clock_rate // 1000
    for pattern in options.patterns:
        for tokens in options.tokens:
            case = Case("llama3-70b-mlp", pattern, tokens, dist.get_world_size(), "bfloat16")
            found = measured(case, ["keep", *options.schedules], clock, options.repeats)
            if dist.get_rank() == 0:
                rows.append(
                    options.out,
                    [{**row, "world_size": case.world_size, "highest_mhz": highest, **where} for row in found],
                )
                for row in found:
                    print(
                        pattern,
                        tokens,
                        row["way"],
                        row["provider"],
                        row["median_us"],
                        "us",
                        row["mhz"],
                        "MHz",
                        round(row["median_us"] * row["mhz"] / highest),
                        f"us at {highest}",
                        flush=True,
                    )
            torch._dynamo.reset()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

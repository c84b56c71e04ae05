"""Schedules that are one op a site, against ``keep``, async TP's op and the bounds, in one run: one torchrun for everything, one JSON row a measurement.

    torchrun --nproc-per-node 4 -m bench.operators --schedules fused chunked --tokens 1024 4096 --out rows.jsonl [--quick]
    torchrun --nproc-per-node 4 -m bench.operators --schedules chunked --dtype fp8_rows --quick

What is measured, and how: ``bench.fused``. ``host_us``: of the host for one call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton

from bench.fused import SHAPES
from bench.fused import Site
from bench.fused import measure
from bench.fused import variants as fused_variants
from overlap_inductor.lowerings.chunked_plan import ChunkedParameters
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.arena import WorkspaceArena
from overlap_inductor.transports.faults import FaultRecord

Variants = dict[str, FusedParameters | ChunkedParameters]


def chunked_variants(pattern: str, sms: int, world_size: int) -> Variants:
    """Chunks of both transports: from one matmul beside the own one to one a shard, and to more than shards; for an all-reduce bands, too."""
    found: Variants = {}
    chunks = sorted({1, 2, 3, world_size - 1, 2 * (world_size - 1)})
    for transport in ("copy_engine", "sm_push"):
        if pattern == "matmul_all_reduce":
            for bands, count in ((1, 2), (1, world_size - 1), (2, 0), (2, 2), (4, 0), (8, 0)):
                found[f"chunked {transport} bands{bands} c{count}"] = ChunkedParameters(sms, transport, count, bands=bands)
            continue
        for count in chunks:
            found[f"chunked {transport} c{count}"] = ChunkedParameters(sms, transport, count)
        if transport == "sm_push":
            found |= {f"chunked sm_push c{min(3, world_size - 1)} p{p}": ChunkedParameters(sms, transport, min(3, world_size - 1), pushers=p) for p in (8, 32)}
    return found


def all_variants(schedules: list[str], pattern: str, sms: int, tokens: int, world_size: int, quick: bool) -> Variants:
    """The parameters to try, by name; ``quick``: at most four of a schedule, spread over its list."""
    found: Variants = {}
    for schedule in schedules:
        some: Variants = dict(fused_variants(pattern, sms, tokens)) if schedule == "fused" else chunked_variants(pattern, sms, world_size)
        names = list(some)[:: -(-len(some) // 4)] if quick else list(some)
        found |= {name: some[name] for name in names}
    return found


def main(schedules: tuple[str, ...] = ("fused",)) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--patterns", nargs="+", default=["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
    parser.add_argument("--shapes", nargs="+", default=["mlp"])
    parser.add_argument("--schedules", nargs="+", default=list(schedules), choices=["fused", "chunked"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp8", "fp8_rows"], help="fp8: one scale an operand; fp8_rows: one a row and column")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    if arguments.dtype != "bf16" and arguments.schedules != ["chunked"]:
        parser.error(f"--dtype {arguments.dtype} is for --schedules chunked, not {' '.join(arguments.schedules)}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    properties = torch.cuda.get_device_properties(device)
    faults = FaultRecord.of(dist.group.WORLD.group_name, range(world_size), device)
    arena = WorkspaceArena(
        world_size, device, lambda n, dtype: symmetric.allocate(n, dtype, device, dist.group.WORLD), torch.cuda.is_current_stream_capturing, 2**34
    )
    environment = {"torch": torch.__version__, "triton": triton.__version__, "gpu": properties.name, "world_size": world_size}
    # The largest first: what follows finds room in its slots.
    for shape, pattern, tokens in itertools.product(arguments.shapes, arguments.patterns, sorted(arguments.tokens, reverse=True)):
        site = Site(pattern, tokens, SHAPES[shape], rank, world_size, arena, faults, arguments.dtype)
        settings = all_variants(arguments.schedules, pattern, properties.multi_processor_count, tokens, world_size, arguments.quick)
        rows = measure(site, arguments.repeats, settings)
        del site
        if rank == 0:
            best = min((r for r in rows if "parameters" in r and r["right"]), key=lambda r: r["us"], default=None)
            found = {r["provider"]: (r.get("us"), r.get("speedup"), r.get("host_us"), r["right"]) for r in rows}
            print(pattern, shape, tokens, arguments.dtype, found, "best", best and best["provider"], flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.writelines(json.dumps({"pattern": pattern, "shape": shape, "tokens": tokens, "dtype": arguments.dtype, **row, **environment}) + "\n" for row in rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(("fused", "chunked"))

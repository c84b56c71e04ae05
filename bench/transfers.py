# SPDX-License-Identifier: Apache-2.0
"""Measure the time to send one shard to every peer, by size of the shard.

A *provider* is what sends the shard: NCCL's all-gather, copy engines, stores by SMs (``sm_push``) or bulk copies by SMs
(``bulk``). Each measurement is one JSON row.

    torchrun --nproc-per-node 4 -m bench.transfers --out rows.jsonl

The time of a rank begins with its own sends, and ends when the data of all peers has arrived. The rank's GPU measures
the time, in microseconds. A row holds one time: each rank takes its median over the repeats, and the row has the
largest of these medians. ``right``: whether the right data arrived in a call before the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from bench.push_kernels import push_bulk
from bench.push_kernels import push_striped
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.torch_compat import symmetric

PATIENCE_NS = 10_000_000_000
MEGABYTES = (0.25, 1, 2, 4, 8, 16, 32)


@triton.jit
def wait_for_peers(flags, rank, target, stop, patience, WORLD: tl.constexpr, PARTS: tl.constexpr):
    for turn in range(1, WORLD):
        for part in range(PARTS):
            peer = (rank + turn) % WORLD
            wait_at_least(flags + (peer * PARTS + part) * 32, target, stop, patience, 1, peer)


class Transfers:
    def __init__(self, rank: int, world_size: int, words: int) -> None:
        self.rank, self.world_size, self.words = rank, world_size, words
        device = torch.device("cuda", torch.cuda.current_device())
        self.data = symmetric.allocate(words * world_size, torch.int32, device, dist.group.WORLD)
        self.flags = symmetric.allocate(64 * world_size * 32, torch.int32, device, dist.group.WORLD)
        self.faults = FaultRecord.of("transfers", range(world_size), device)
        self.source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device)
        self.gathered = torch.empty(words * world_size, dtype=torch.int32, device=device)
        dist.all_gather_into_tensor(self.gathered, self.source)
        self.received = torch.empty_like(self.gathered)
        self.stream = torch.cuda.Stream(priority=-1)
        self.target = 0

    def wait(self, parts: int) -> None:
        wait_for_peers[(1,)](
            self.flags.local, self.rank, self.target, self.faults.stop, PATIENCE_NS, self.world_size, parts, num_warps=1
        )

    def nccl(self) -> None:
        dist.all_gather_into_tensor(self.received, self.source)

    def copy_engine(self, parts: int) -> None:
        self.target += 1
        for turn in range(1, self.world_size):
            peer = (self.rank + turn) % self.world_size
            for part, piece in enumerate(self.source.chunk(parts)):
                start = self.rank * self.words + part * (self.words // parts)
                self.data.peers[peer][start : start + piece.numel()].copy_(piece)
                symmetric.write_value_on_stream(self.flags.peers[peer], (self.rank * parts + part) * 32, self.target)
        self.wait(parts)

    def push(self, blocks: int, block: int, warps: int, parts: int) -> None:
        self.target += blocks
        arguments = (
            self.source,
            self.data.pointers,
            self.flags.pointers,
            self.rank * self.words,
            self.words,
            self.rank,
        )
        push_striped[(blocks,)](*arguments, self.world_size, parts, block, blocks, num_warps=warps)
        self.wait(parts)

    def bulk(self, blocks: int, rows: int, columns: int, warps: int) -> None:
        self.target += blocks
        arguments = (
            self.source,
            self.data.pointers,
            self.flags.pointers,
            self.rank * self.words,
            self.words,
            self.rank,
        )
        push_bulk[(blocks,)](*arguments, self.world_size, rows, columns, blocks, num_warps=warps)
        self.wait(1)

    def restart(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.flags.local.zero_()
        self.target = 0
        torch.cuda.synchronize()
        dist.barrier()

    def is_right(self, function: Callable[[], None], peer_memory: bool) -> bool:
        self.restart()
        self.data.local.zero_()
        self.received.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        function()
        torch.cuda.synchronize()
        found = self.data.local if peer_memory else self.received
        if peer_memory:
            found[self.rank * self.words : (self.rank + 1) * self.words] = self.source
        same = torch.tensor(
            [float(torch.equal(found, self.gathered)) * float(self.faults.error() is None)], device="cuda"
        )
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same)


def providers(transfers: Transfers) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {"nccl": transfers.nccl}
    for parts in (1, 4):
        found[f"copy_engine parts={parts}"] = lambda p=parts: transfers.copy_engine(p)
    for blocks in (4, 8, 16, 32):
        for block, warps in ((4096, 8), (8192, 16), (8192, 8)):
            found[f"sm_push blocks={blocks} block={block} warps={warps}"] = lambda a=blocks, b=block, c=warps: (
                transfers.push(a, b, c, 1)
            )
    found["sm_push blocks=16 block=4096 warps=8 parts=4"] = lambda: transfers.push(16, 4096, 8, 4)
    for blocks in (4, 8, 16, 32):
        for rows, columns, warps in ((32, 128, 4), (64, 256, 4)):
            found[f"bulk blocks={blocks} tile={rows}x{columns} warps={warps}"] = (
                lambda a=blocks, r=rows, c=columns, w=warps: transfers.bulk(a, r, c, w)
            )
    return found


def measure(transfers: Transfers, repeats: int) -> dict[str, tuple[bool, float]]:
    result = {}
    marker = torch.zeros(1, device="cuda")
    for name, function in providers(transfers).items():
        right = transfers.is_right(function, name != "nccl")
        transfers.restart()
        function()
        times = []
        for _ in range(repeats):
            dist.all_reduce(marker)
            torch.cuda._sleep(400_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        worst = torch.tensor([statistics.median(times)], device="cuda")
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        result[name] = (right, round(float(worst), 1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=None)
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    rows: list[dict[str, Any]] = []
    for megabytes in MEGABYTES:
        words = int(megabytes * 2**20) // 4
        for name, (right, microseconds) in measure(Transfers(rank, world_size, words), arguments.repeats).items():
            rate = words * 4 * (world_size - 1) / microseconds / 1e3
            rows.append(
                {
                    "world_size": world_size,
                    "megabytes": megabytes,
                    "provider": name,
                    "right": right,
                    "us": microseconds,
                    "gb_per_s": round(rate, 1),
                }
            )
        if rank == 0:
            best = sorted((r for r in rows if r["megabytes"] == megabytes), key=lambda r: r["us"])
            print(megabytes, [(r["provider"], r["us"], r["gb_per_s"], r["right"]) for r in best[:5]], flush=True)
            print(
                "  ",
                [(r["provider"], r["us"]) for r in best if r["provider"].startswith(("nccl", "copy"))],
                [r["provider"] for r in best if not r["right"]],
                flush=True,
            )
    if rank == 0 and arguments.out:
        environment = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
        with open(arguments.out, "a") as file:
            file.writelines(json.dumps({**row, **environment}) + "\n" for row in rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

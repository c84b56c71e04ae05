# SPDX-License-Identifier: Apache-2.0
"""Litmus tests of the memory orderings that the kernels need between two GPUs.

    torchrun --nproc-per-node 2 -m tests.gpu.check_litmus [--rounds 20000] [--only "two blocks, bulk"]
    torchrun --nproc-per-node 2 -m tests.gpu.check_litmus --ranks-share-gpus

Each test pairs one *way* to write with one way to read. Some ways omit an ordering on purpose, and their data may be
wrong. An even rank writes, and the next odd rank, its partner, reads. In each round:

1. block b of the writer fills a tile in its partner's memory with the round's number, and signals. Two blocks or the
   copy engine take the place of block b if the way's name says so;
2. block b of the partner waits, counts the words that hold another number, and acknowledges.

Afterwards, blocks write and read within one GPU. Rank 0 prints one JSON row per test. Rows of earlier runs are in
``bench/results/litmus.jsonl``. The exit status is 1 in these cases:

- a word was wrong in a test of ways on which the kernels rely;
- a wait timed out;
- the time-out that is provoked at the end is not recorded correctly.

Ranks that share a GPU take turns on it. A rank then seldom reads while its partner's stores are in flight. So a run
with ``--ranks-share-gpus`` shows only that every test runs. Only a run on two GPUs can show that an ordering is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.kernels.group_signals import signal_ranks
from overlap_inductor.kernels.group_signals import wait_for_all
from overlap_inductor.kernels.signals import add_flag
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import load_fence
from overlap_inductor.kernels.signals import set_flag
from overlap_inductor.kernels.signals import store_fence
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.runtime.faults import FaultRecord
from tests.gpu.signal_kernels import give
from tests.gpu.signal_kernels import wait_for

ROWS, COLUMNS, BLOCKS = 64, 128, 64
WORDS, ACKNOWLEDGED = 128, 64
"""``WORDS``: the number of words that each block has in ``Litmus.flags``. Of these, words 0 and 32 are flags, word
``ACKNOWLEDGED`` is the reader's acknowledgement, and word 96 is a counter."""
PATIENCE_NS = 5_000_000_000


@triton.jit
def write_rounds(
    peer,
    peer_desc,
    acknowledged,
    peer_flags,
    stop,
    first,
    rounds,
    patience,
    way: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Write tiles and signal. ``way``:

    - ``ordinary``: store the tile, then release the flag;
    - ``unordered``: set the flag by a plain store, then store the tile;
    - ``bulk``: store the tile by the bulk copy unit, then fence, then release the flag;
    - ``bulk without fence``: ``bulk`` without its fence.
    """
    block = tl.program_id(0)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    for i in range(first, first + rounds):
        tile = tl.full((R, C), 0, tl.int32) + i
        if way == "unordered":
            tl.store(peer_flags + block * 128, i)
            tl.store(peer + block * R * C + offsets, tile)
        elif way == "ordinary":
            tl.store(peer + block * R * C + offsets, tile)
            set_flag(peer_flags + block * 128, i)
        else:
            peer_desc.store([block * R, 0], tile)
            if way == "bulk":
                store_fence()
            set_flag(peer_flags + block * 128, i)
        wait_at_least(acknowledged + block * 128 + 64, i, stop, patience, 1, 0)


@triton.jit
def write_halves(
    peer, acknowledged, peer_flags, counters, stop, first, rounds, patience, R: tl.constexpr, C: tl.constexpr
):
    """Two blocks each store half a tile and add to a counter. The block that adds last signals for both."""
    block = tl.program_id(0) // 2
    rows = tl.program_id(0) % 2 * (R // 2) + tl.arange(0, R // 2)
    offsets = rows[:, None] * C + tl.arange(0, C)[None, :]
    for i in range(first, first + rounds):
        tl.store(peer + block * R * C + offsets, tl.full((R // 2, C), 0, tl.int32) + i)
        count_and_signal(counters + block, 2, peer_flags + block * 128, i, stop)
        wait_at_least(acknowledged + block * 128 + 64, i, stop, patience, 1, 0)


@triton.jit
def write_halves_in_bulk(
    half_desc,
    acknowledged,
    peer_flags,
    counters,
    stop,
    first,
    rounds,
    patience,
    fence: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """``write_halves`` with the bulk copy unit. ``half_desc``: the peer's tiles, in halves.

    With ``fence``, each block orders its own bulk stores before its add to the counter (``store_fence``). The block
    that adds last has acquired the other block's add. So its release also covers the other block's half.
    """
    for i in range(first, first + rounds):
        half_desc.store([tl.program_id(0) * (R // 2), 0], tl.full((R // 2, C), 0, tl.int32) + i)
        if fence:
            store_fence()
        block = tl.program_id(0) // 2
        count_and_signal(counters + block, 2, peer_flags + block * 128, i, stop)
        wait_at_least(acknowledged + block * 128 + 64, i, stop, patience, 1, 0)


@triton.jit
def write_halves_each(
    peer,
    acknowledged,
    peer_flags,
    table,
    stop,
    first,
    rounds,
    patience,
    rank,
    added: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Two blocks each store half a tile and signal it. With ``added``, both add to one counter. Otherwise each sets its
    own flag (``signal_ranks``)."""
    block, half = tl.program_id(0) // 2, tl.program_id(0) % 2
    rows = half * (R // 2) + tl.arange(0, R // 2)
    offsets = rows[:, None] * C + tl.arange(0, C)[None, :]
    for i in range(first, first + rounds):
        tl.store(peer + block * R * C + offsets, tl.full((R // 2, C), 0, tl.int32) + i)
        if added:
            add_flag(peer_flags + block * 128 + 96, 1)
        else:
            signal_ranks(table, block * 128 + half * 32, i, rank, 0, 2)
        wait_at_least(acknowledged + block * 128 + 64, i, stop, patience, 1, 0)


@triton.jit
def send_inside(
    mine, desc, flags, wrong, stop, first, rounds, patience, fence: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Inside one GPU, an even block stores a tile in bulk and adds to a flag, at the GPU's scope.

    The next odd block acquires the flag and loads the tile past L1. An all-reduce's pushing blocks load in this way.
    """
    block = tl.program_id(0) // 2
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    bad = tl.full((), 0, tl.int32)
    for i in range(first, first + rounds):
        if tl.program_id(0) % 2 == 0:
            desc.store([block * R, 0], tl.full((R, C), 0, tl.int32) + i)
            if fence:
                store_fence()
            tl.debug_barrier()
            tl.atomic_add(flags + block * 128, 1, sem="release", scope="gpu")
            wait_at_least(flags + block * 128 + 64, i, stop, patience, 4, 0)
        else:
            wait_at_least(flags + block * 128, i, stop, patience, 5, 0)
            bad += tl.sum((tl.load(mine + block * R * C + offsets, cache_modifier=".cg") != i).to(tl.int32))
            set_flag(flags + block * 128 + 64, i)
    if tl.program_id(0) % 2 == 1:
        tl.store(wrong + block, bad)


@triton.jit
def read_rounds(
    mine,
    desc,
    flags,
    peer_flags,
    wrong,
    stop,
    first,
    rounds,
    patience,
    way: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Wait for tiles, count wrong words and acknowledge. ``way``:

    - ``ordinary``: wait for one flag, then load the tile;
    - ``added``: wait until both blocks have added to the counter in this round, then load the tile;
    - ``both flags``: wait for two flags (``wait_for_all``), then load the tile;
    - ``bulk``: wait for one flag, then fence, then load the tile by the bulk copy unit;
    - ``bulk without fence``: ``bulk`` without its fence.
    """
    block = tl.program_id(0)
    offsets = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    bad = tl.full((), 0, tl.int32)
    for i in range(first, first + rounds):
        if way == "added":
            wait_at_least(flags + block * 128 + 96, 2 * (i - first + 1), stop, patience, 2, 0)
        elif way == "both flags":
            wait_for_all(flags + block * 128, i, 1, 2, 128, -1, stop, patience, 2, 0)
        else:
            wait_at_least(flags + block * 128, i, stop, patience, 2, 0)
        if way == "ordinary" or way == "added" or way == "both flags":
            tile = tl.load(mine + block * R * C + offsets)
        else:
            if way == "bulk":
                load_fence()
            tile = desc.load([block * R, 0])
        bad += tl.sum((tile != i).to(tl.int32))
        set_flag(peer_flags + block * 128 + 64, i)
    tl.store(wrong + block, bad)


WAYS = [  # (way of the writer, way of the reader, whether the kernels rely on it)
    ("ordinary", "ordinary", True),
    ("unordered", "ordinary", False),
    ("two blocks", "ordinary", True),
    ("two blocks", "bulk", True),
    ("two blocks, bulk", "ordinary", True),
    ("two blocks, bulk", "bulk", True),
    ("two blocks, bulk without fence", "ordinary", False),
    ("two blocks, each adds", "added", True),
    ("two blocks, a flag each", "both flags", True),
    ("bulk", "ordinary", True),
    ("bulk without fence", "ordinary", False),
    ("ordinary", "bulk", True),
    ("ordinary", "bulk without fence", False),
    ("bulk", "bulk", True),
    ("copy engine", "ordinary", True),
    ("copy engine", "bulk", True),
    ("copy engine, copied flag", "ordinary", True),
    ("copy engine, copied flag", "bulk", True),
    ("copy engine, flag by a kernel", "bulk", True),
]


class Litmus:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.partner = rank, rank ^ 1
        self.writes = rank % 2 == 0 and self.partner < world_size
        self.reads = rank % 2 == 1
        shape = (BLOCKS * ROWS, COLUMNS)
        self.data = symmetric_memory.empty(shape, dtype=torch.int32, device="cuda").zero_()
        self.flags = symmetric_memory.empty(BLOCKS * WORDS, dtype=torch.int32, device="cuda").zero_()
        handles = [symmetric_memory.rendezvous(t, dist.group.WORLD) for t in (self.data, self.flags)]
        other = self.partner if self.partner < world_size else rank
        self.peer = handles[0].get_buffer(other, shape, torch.int32)
        self.peer_flags = handles[1].get_buffer(other, (BLOCKS * WORDS,), torch.int32)
        self.handles = handles
        self.faults = FaultRecord.of("litmus", range(world_size), self.data.device)
        self.counters = torch.zeros(BLOCKS, dtype=torch.int32, device="cuda")
        self.wrong = torch.zeros(BLOCKS, dtype=torch.int32, device="cuda")
        self.table = torch.tensor([self.flags.data_ptr(), self.peer_flags.data_ptr()], dtype=torch.int64, device="cuda")
        self.descriptors = [TensorDescriptor.from_tensor(t, [ROWS, COLUMNS]) for t in (self.data, self.peer)]
        self.halves = TensorDescriptor.from_tensor(self.peer, [ROWS // 2, COLUMNS])
        self.next = 1

    def write(self, way: str, rounds: int) -> None:
        if way == "two blocks":
            arguments = (
                self.peer,
                self.flags,
                self.peer_flags,
                self.counters,
                self.faults.stop,
                self.next,
                rounds,
                PATIENCE_NS,
            )
            write_halves[(2 * BLOCKS,)](*arguments, ROWS, COLUMNS, num_warps=4)
            return
        if way.startswith("two blocks, bulk"):
            arguments = (
                self.halves,
                self.flags,
                self.peer_flags,
                self.counters,
                self.faults.stop,
                self.next,
                rounds,
                PATIENCE_NS,
            )
            write_halves_in_bulk[(2 * BLOCKS,)](*arguments, "without" not in way, ROWS, COLUMNS, num_warps=4)
            return
        if way.startswith("two blocks, "):
            arguments = (
                self.peer,
                self.flags,
                self.peer_flags,
                self.table,
                self.faults.stop,
                self.next,
                rounds,
                PATIENCE_NS,
            )
            write_halves_each[(2 * BLOCKS,)](*arguments, 0, "adds" in way, ROWS, COLUMNS, num_warps=4)
            return
        if not way.startswith("copy engine"):
            arguments = (
                self.peer,
                self.descriptors[1],
                self.flags,
                self.peer_flags,
                self.faults.stop,
                self.next,
                rounds,
                PATIENCE_NS,
            )
            write_rounds[(BLOCKS,)](*arguments, way, ROWS, COLUMNS, num_warps=4)
            return
        source = torch.empty_like(self.data)
        for i in range(self.next, self.next + rounds):
            source.fill_(i)
            word = source.view(-1)[:1]
            self.peer.copy_(source)
            for block in range(BLOCKS):
                flag = self.peer_flags[block * WORDS : block * WORDS + 1]
                if way == "copy engine, copied flag":
                    flag.copy_(word, non_blocking=True)
                elif way == "copy engine, flag by a kernel":
                    give[(1,)](flag, i, num_warps=1)
                else:
                    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(
                        self.peer_flags.view(torch.uint32), block * WORDS, i
                    )
            for block in range(BLOCKS):
                wait_for[(1,)](
                    self.flags[block * WORDS + ACKNOWLEDGED :], i, self.faults.stop, PATIENCE_NS, num_warps=1
                )

    def read(self, way: str, rounds: int) -> None:
        arguments = (
            self.data,
            self.descriptors[0],
            self.flags,
            self.peer_flags,
            self.wrong,
            self.faults.stop,
            self.next,
            rounds,
            PATIENCE_NS,
        )
        read_rounds[(BLOCKS,)](*arguments, way, ROWS, COLUMNS, num_warps=4)

    def run(self, writer: str, reader: str, rounds: int) -> dict[str, Any]:
        # The first launch of a kernel loads it, and loading waits for an idle device. So every kernel is launched once
        # before any kernel waits.
        for amount in (0, rounds):
            dist.barrier()
            torch.cuda.synchronize()
            if amount == 0:
                wait_for[(1,)](self.flags, 0, self.faults.stop, PATIENCE_NS, num_warps=1)
                give[(1,)](self.counters, 0, num_warps=1)
            if self.writes:
                self.write(writer, amount)
            if self.reads:
                self.read(reader, amount)
            torch.cuda.synchronize()
        self.next += rounds
        wrong = of_all_ranks([int(self.wrong.sum()) if self.reads else 0, int(self.faults.error() is not None)])
        return {
            "writer": writer,
            "reader": reader,
            "rounds": rounds,
            "wrong_words": int(wrong[0]),
            "faults": int(wrong[1]),
            "words": rounds * BLOCKS * ROWS * COLUMNS,
        }


def of_all_ranks(counts: list[int]) -> list[int]:
    """The element-wise sums of ``counts`` over all ranks."""
    found = torch.tensor(counts, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found)
    return [int(count) for count in found]


def inside_one_gpu(litmus: Litmus, fence: bool, rounds: int) -> dict[str, Any]:
    """Run ``send_inside`` on each rank's GPU. Returns a row like that of ``Litmus.run``."""
    flags = torch.zeros(BLOCKS * WORDS, dtype=torch.int32, device="cuda")
    for amount in (0, rounds):
        send_inside[(2 * BLOCKS,)](
            litmus.data,
            litmus.descriptors[0],
            flags,
            litmus.wrong,
            litmus.faults.stop,
            1,
            amount,
            PATIENCE_NS,
            fence,
            ROWS,
            COLUMNS,
            num_warps=4,
        )
        torch.cuda.synchronize()
    wrong = of_all_ranks([int(litmus.wrong.sum()), int(litmus.faults.error() is not None)])
    ways = {"writer": "bulk" if fence else "bulk without fence", "reader": "another block of the GPU, past L1"}
    return {
        **ways,
        "rounds": rounds,
        "wrong_words": int(wrong[0]),
        "faults": int(wrong[1]),
        "words": rounds * BLOCKS * ROWS * COLUMNS * dist.get_world_size(),
    }


def fault_is_recorded(litmus: Litmus) -> dict[str, Any]:
    """Run a wait whose signal never comes. Returns a row with the recorded fault."""
    faults = FaultRecord.of("litmus", range(2), litmus.data.device)
    wait_for[(8,)](litmus.flags, 0, faults.stop, 50_000_000, num_warps=4)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    wait_for[(8,)](litmus.flags, litmus.next + 12345, faults.stop, 50_000_000, num_warps=4)
    end.record()
    torch.cuda.synchronize()
    return {
        "fault": faults.board.record(0).tolist(),
        "expected_wanted": litmus.next + 12345,
        "ms": round(start.elapsed_time(end), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, help="default: 20000, or 200 if ranks share GPUs")
    parser.add_argument(
        "--copied-rounds",
        type=int,
        help="limit of rounds with the copy engine; default: 2000, or 20 if ranks share GPUs",
    )
    parser.add_argument(
        "--only", default="", help="between two GPUs, test only those ways to write whose names begin with this"
    )
    parser.add_argument("--ranks-share-gpus", action="store_true")
    arguments = parser.parse_args()
    share = arguments.ranks_share_gpus
    rounds, copied_rounds = (
        arguments.rounds or (200 if share else 20000),
        arguments.copied_rounds or (20 if share else 2000),
    )
    rank, world_size = start_rank(share_gpus=share)
    litmus = Litmus(rank, world_size)
    failed = 0
    for writer, reader, claimed in WAYS:
        if not writer.startswith(arguments.only):
            continue
        row = litmus.run(writer, reader, min(rounds, copied_rounds) if writer.startswith("copy engine") else rounds)
        row["claimed"] = claimed
        failed += bool(row["faults"]) or (claimed and bool(row["wrong_words"]))
        if rank == 0:
            print(json.dumps(row), flush=True)
    for fence in (True, False):
        row = {**inside_one_gpu(litmus, fence, rounds), "claimed": fence}
        failed += bool(row["faults"]) or (fence and bool(row["wrong_words"]))
        if rank == 0:
            print(json.dumps(row), flush=True)
    row = fault_is_recorded(litmus)
    failed += (
        row["fault"][:1] != [1]
        or row["fault"][1] != 3
        or row["fault"][3] != row["expected_wanted"]
        or not 45 < row["ms"] < 200
    )
    if rank == 0:
        print(json.dumps(row), flush=True)
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

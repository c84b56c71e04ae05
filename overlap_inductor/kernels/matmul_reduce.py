"""Schedule ``fused``: ``reduce_scatter(a @ b)`` and ``all_reduce(a @ b)`` in one persistent kernel; every tile leaves from its epilogue.

A rank's rows of the product belong to the ranks in equal shards, and a shard is cut into ``PARTS`` bands. A tile of another rank's shard is
stored into that rank's workspace as soon as it is summed over K, in the collective's dtype; a tile of the own shard is summed in fp32 with
what has come for it, and rounded once (``preserve``). Bands go one after the other: ::

    band 0 of all peers' shards, band 1, own band 0, band 2, own band 1, ..., own band PARTS - 1          LAG = 1
    all bands of all peers' shards, own band 0, own band 1, ...                                            LAG = PARTS

With ``BROADCAST`` (all-reduce) a finished own tile is stored into every peer's result too, under the matmul of later bands, and the kernel ends
when the peers' bands have come.

Forward progress. Tiles are claimed from one queue, in the order above on every rank. A block waits only for an own tile of band ``p``, hence for
the peers' tiles of band ``p``, all of which stand before own band ``p`` in the peers' queues; what stands before those waits at most for
bands before ``p``. So by induction no wait rests on itself, with one resident block a rank as with all. Credits rest on the call before.
The wait at the end comes when a block has nothing left to claim. All waits are bounded (``signals``).

Memory ordering: ordinary stores and ``count_and_signal``, the last tile of a band setting the flag to the number of the call; the receiver waits and loads by ordinary loads that bypass L1. The workspace is written again
after the credits: the last block gives them, or with ``BROADCAST``, whose result stands in the workspace, ``give_credits`` behind the kernel that
has copied it. CUDA graphs: the number of the call is read from device memory and counted on by the last block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import set_flag
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import arriving
from overlap_inductor.kernels.tile_order import grouped

QUEUES = 2
"""int32 words at the head of ``queues``: tiles claimed, blocks that have finished. ``WORLD * (PARTS + 1)`` counters of tiles stored follow. All zero
before a call and after it."""
WAIT_CREDIT = tl.constexpr(1)
WAIT_PARTIALS = tl.constexpr(3)
WAIT_RESULT = tl.constexpr(4)


@triton.jit
def _turn(turn, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr):
    """``(own, turn among the own tiles or the peers' tiles)`` of a turn in the kernel's queue; own is -1 behind the last."""
    own = -1
    inner = turn
    left = turn
    for slot in tl.static_range(PARTS + LAG):
        rows = tl.maximum(tl.minimum(tiles_shard - slot * tiles_part, tiles_part), 0)
        count = rows * tiles_n * (WORLD - 1)
        here = (own < 0) & (left < count) & (left >= 0)
        inner = tl.where(here, slot * tiles_part * tiles_n * (WORLD - 1) + left, inner)
        own = tl.where(here, 0, own)
        left = left - count
        if slot >= LAG:
            rows = tl.maximum(tl.minimum(tiles_shard - (slot - LAG) * tiles_part, tiles_part), 0)
            count = rows * tiles_n
            here = (own < 0) & (left < count) & (left >= 0)
            inner = tl.where(here, (slot - LAG) * tiles_part * tiles_n + left, inner)
            own = tl.where(here, 1, own)
            left = left - count
    return own, inner


@triton.jit(do_not_specialize=["rank"])
def matmul_reduce(
    a_desc, b_desc, out, staging, peer_data, out_offset, peer_flags, flags, queues, calls, fault, patience,
    rank, rows, columns, inner, part_rows, signals, scale,
    WORLD: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr, BROADCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks, at best one an SM.

    Args:
        a_desc: ``[WORLD * rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``; b_desc: ``[columns, inner]`` (the right operand transposed).
        out: this rank's result: its shard ``[rows, columns]``, or with ``BROADCAST`` all shards ``[WORLD * rows, columns]`` in workspace.
        staging: this rank's workspace ``[WORLD, rows, columns]`` of ``out``'s dtype: what has come from each source.
        peer_data, peer_flags: int64 ``[WORLD]``, addresses of the peers' workspace and flags. ``staging`` stands at its head, and with
            ``BROADCAST`` ``out`` stands ``out_offset`` elements behind it.
        flags: flag ``p``: calls that peer ``p`` has finished; ``WORLD + s * signals + i``: the call whose band ``i`` has come from source ``s``;
            with ``BROADCAST`` ``WORLD + s * signals + PARTS``: the call whose finished shard has come from ``s``.
        queues, calls: int32 in this rank's own memory.
        part_rows: rows of a band, a multiple of ``BLOCK_M``. scale: what the sum is multiplied with (1, or ``1 / WORLD`` for an average).
    """
    call = tl.load(calls)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    tiles_part = part_rows // BLOCK_M
    size = rows.to(tl.int64) * columns
    credit = -1
    complete = -1
    claimed = tl.atomic_add(queues, 1, sem="relaxed")
    while claimed < tiles_shard * tiles_n * WORLD:
        own, turn = _turn(claimed, tiles_shard, tiles_part, tiles_n, WORLD, PARTS, LAG)
        shard, m, n = arriving(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
        if own == 1:
            band = turn // (tiles_part * tiles_n)
            m, n = grouped(turn - band * tiles_part * tiles_n, tl.minimum(tiles_shard - band * tiles_part, tiles_part), tiles_n, GROUP_M)
            m += band * tiles_part
            shard = rank
        part = m // tiles_part
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, inner, BLOCK_K):
            total = tl.dot(a_desc.load([shard * rows + m * BLOCK_M, k]), b_desc.load([n * BLOCK_N, k]).T, total)
        at_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
        at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
        offsets = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
        if own == 1:
            if part != complete:
                for step in range(1, WORLD):
                    source = (rank + step) % WORLD
                    wait_at_least(flags + (WORLD + source * signals + part) * 32, call + 1, fault, patience, WAIT_PARTIALS, source)
                complete = part
            for step in range(1, WORLD):
                source = (rank + step) % WORLD
                total += tl.load(staging + source * size + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            result = (total * scale).to(out.dtype.element_ty)
            if BROADCAST:
                tl.store(out + rank * size + offsets, result, mask=inside)
                for step in range(1, WORLD):
                    peer = (rank + step) % WORLD
                    wait_at_least(flags + peer * 32, call, fault, patience, WAIT_CREDIT, peer)
                    to = tl.multiple_of(tl.load(peer_data + peer).to(out.dtype), 16) + out_offset
                    tl.store(to + rank * size + offsets, result, mask=inside)
                    flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
                    done = queues + 2 + WORLD * PARTS + peer
                    count_and_signal(done, tiles_shard * tiles_n, flag + (WORLD + rank * signals + PARTS) * 32, call + 1)
            else:
                tl.store(out + offsets, result, mask=inside)
        else:
            if shard != credit:
                wait_at_least(flags + shard * 32, call, fault, patience, WAIT_CREDIT, shard)
                credit = shard
            to = tl.multiple_of(tl.load(peer_data + shard).to(out.dtype), 16)
            tl.store(to + rank * size + offsets, total.to(out.dtype.element_ty), mask=inside)
            flag = tl.load(peer_flags + shard).to(tl.pointer_type(tl.int32))
            band_tiles = tl.minimum(tiles_shard - part * tiles_part, tiles_part) * tiles_n
            count_and_signal(queues + 2 + shard * PARTS + part, band_tiles, flag + (WORLD + rank * signals + part) * 32, call + 1)
        claimed = tl.atomic_add(queues, 1, sem="relaxed")

    if BROADCAST:
        for step in range(1, WORLD):
            source = (rank + step) % WORLD
            wait_at_least(flags + (WORLD + source * signals + PARTS) * 32, call + 1, fault, patience, WAIT_RESULT, source)
    tl.debug_barrier()
    finished = tl.atomic_add(queues + 1, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        tl.store(queues, 0)
        tl.store(queues + 1, 0)
        tl.store(calls, call + 1)
        if not BROADCAST:
            _give_credits(peer_flags, call + 1, rank, WORLD)


@triton.jit
def _give_credits(peer_flags, call, rank, WORLD: tl.constexpr):
    for step in range(1, WORLD):
        flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
        set_flag(flag + rank * 32, call)


@triton.jit(do_not_specialize=["rank"])
def give_credits(peer_flags, calls, rank, WORLD: tl.constexpr):
    """Tell the peers that this rank has read what the last call left in its workspace. Grid: one block, behind the reader on its stream."""
    _give_credits(peer_flags, tl.load(calls), rank, WORLD)

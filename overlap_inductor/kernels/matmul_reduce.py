"""Schedule ``fused``: ``reduce_scatter(a @ b)`` and ``all_reduce(a @ b)`` in one persistent kernel; every tile leaves from its epilogue.

A rank's rows of the product belong to the ranks in equal shards, and a shard is cut into ``PARTS`` bands. A tile of another rank's shard goes
to that rank's workspace when it is summed over K, in the collective's dtype; a tile of the own shard is summed in fp32 with what has come for
it, and rounded once (``preserve``). With ``BROADCAST`` (all-reduce) it goes to every peer's workspace too, and the peers' finished tiles are copied
from there into the result. Bands go one after the other, own tiles ``LAG`` bands behind the peers', copies ``COPY_LAG`` bands behind those: ::

    LAG = 1, COPY_LAG = 2:    peers 0, peers 1, own 0, peers 2, own 1, peers 3, own 2, copy 0, ..., copy PARTS - 1
    LAG = PARTS, scatter:     all bands of all peers' shards, own 0, own 1, ...

so that the gather leg of a band runs under the matmuls of later ones. A tile leaves as a bulk store out of shared memory, which goes on under the next
tile's matmul; it is counted (``_flush``) when that is done. Blocks start ``STAGGER`` ns one after the other: tiles that end at one moment
would leave at one moment, and loads wait behind stores in an SM's copy unit.

Forward progress. Work is claimed from one queue, in this order on every rank; a block may hold one later turn besides its own (``claim``).
A block waits for an own tile of band ``p`` until the peers' tiles of band ``p`` have come, and for a copy of band ``p`` until the peers' own tiles of
band ``p`` have; in the peers' queues these stand before what waits for them here, and what stands before *those* waits for bands no later
than ``p``. Take the first unfinished turn of all ranks: whoever holds it works at it, as what it works at is no later. So no wait rests
on itself, with one resident block a rank as with all. (A block that waits has counted what it has
stored.) Credits rest on the call before. All waits are bounded (``signals``).

Memory ordering: bulk stores, ``store_fence``, ``count_and_signal``, the last tile of a band setting the flag to the number of the call; the receiver
waits and loads by ordinary loads that bypass L1. The workspace is written again after the credits that the last block gives. CUDA graphs: the
number of the call is read from device memory and counted on by the last block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.epilogue import by_quarters
from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import WAIT_RESULT
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import finish_call
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import store_fence
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import arriving
from overlap_inductor.kernels.tile_order import band_tiles
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import departing
from overlap_inductor.kernels.tile_order import grouped
from overlap_inductor.kernels.tile_order import multiply_tile
from overlap_inductor.kernels.tile_order import store_tile

PEERS = tl.constexpr(0)
OWN = tl.constexpr(1)
COPY = tl.constexpr(2)
NOWHERE = tl.constexpr(2**30)
"""A row that no workspace has: a bulk store there stores nothing."""
SLEEPS = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _turn(turn, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr, COPY_LAG: tl.constexpr, STEPS: tl.constexpr):
    """``(PEERS | OWN | COPY, turn among the tiles of that kind)`` of a turn in the kernel's queue. ``STEPS``: kinds that there are."""
    kind = -1
    inner = turn
    left = turn
    for slot in tl.static_range(PARTS + LAG + COPY_LAG):
        for step in tl.static_range(STEPS):
            band = slot - (0 if step == PEERS else LAG if step == OWN else LAG + COPY_LAG)
            if band >= 0 and band < PARTS:
                sources = 1 if step == OWN else WORLD - 1
                count = band_tiles(band, tiles_shard, tiles_part, tiles_n) * sources
                here = (kind < 0) & (left < count)
                inner = tl.where(here, band * tiles_part * tiles_n * sources + left, inner)
                kind = tl.where(here, step, kind)
                left = left - count
    return kind, inner


@triton.jit
def _stagger(nanoseconds):
    """Sleep, so that blocks that have equal tiles do not send them at one moment."""
    if SLEEPS:
        tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _flush(pending, queues, peer_flags, stop, call, rank, rows, tiles_part, tiles_n, tiles_shard, signals, WORLD: tl.constexpr, PARTS: tl.constexpr):
    """Count a tile whose bulk stores have been started: number ``pending`` is ``shard * PARTS + band``, of the own shard when it went to all peers."""
    if pending >= 0:
        store_fence()
        shard = pending // PARTS
        part = pending % PARTS
        target = band_tiles(part, tiles_shard, tiles_part, tiles_n)
        if shard == rank:
            for step in range(1, WORLD):
                peer = (rank + step) % WORLD
                flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
                count_and_signal(queues + QUEUE_WORDS + (WORLD + peer) * PARTS + part, target, signal_flag(flag, rank, PARTS + part, signals, WORLD), call + 1, stop)
        else:
            flag = tl.load(peer_flags + shard).to(tl.pointer_type(tl.int32))
            count_and_signal(queues + QUEUE_WORDS + shard * PARTS + part, target, signal_flag(flag, rank, part, signals, WORLD), call + 1, stop)
    return -1


@triton.jit(do_not_specialize=["rank", "site", "rows", "limit"])
def matmul_reduce(
    a_desc, b_desc, out, bias, extra0, extra1, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, limit, columns, inner, part_rows, signals, scale,
    WORLD: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr, COPY_LAG: tl.constexpr, BROADCAST: tl.constexpr, STAGGER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BATCH: tl.constexpr, THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks, at best one an SM.

    Args:
        a_desc: ``[limit, inner]``, blocks ``[BLOCK_M, BLOCK_K]``; b_desc, bias, TRANSPOSED, BIAS: see
            ``multiply_tile``.
        out: this rank's result: its shard ``[rows, columns]``, or with ``BROADCAST`` all shards ``[limit, columns]``.
        rows, limit: rows of a shard, and of all shards together: ``WORLD * rows``, or less with ``BROADCAST``, where the last shards may be short.
        EPILOGUE: ``None``, or a function of ``kernels.epilogue``, which reads ``extra0`` and ``extra1``: of the reduced result, on this rank. What is sent is without it.
        staging: this rank's workspace: ``[WORLD, padded, columns]`` of ``out``'s dtype, what has come from each source, where ``padded`` is
            ``rows`` in whole tiles. With ``BROADCAST`` the same again behind it, for finished shards.
        peer_data, peer_flags: int64 ``[WORLD]``, addresses of the peers' workspace and flags.
        flags: ``signal_flag(s, i)``: the call whose band ``i`` has come from source ``s``; with ``BROADCAST`` ``signal_flag(s, PARTS + i)``: the
            call whose finished band ``i`` has.
        queues, calls: int32 in this rank's own memory (``QUEUE_WORDS + 2 * WORLD * PARTS`` words, zero between calls: tiles claimed, blocks
            that have finished, and behind ``QUEUE_WORDS`` tiles stored; one word). site: number under which a fault record names the site.
        part_rows: rows of a band, a multiple of ``BLOCK_M``. scale: what the sum is multiplied with (1, or ``1 / WORLD`` for an average).
        BATCH: tiles after which a block waits for its last store to leave shared memory.
    """
    STEPS: tl.constexpr = 3 if BROADCAST else 2
    STORE_N: tl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    call = tl.load(calls)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    tiles_part = part_rows // BLOCK_M
    padded = tiles_shard * BLOCK_M
    everything = tiles_shard * tiles_n * (WORLD + (WORLD - 1 if BROADCAST else 0))
    peers = ()
    for ahead in tl.static_range(1, WORLD):
        to = tl.multiple_of(tl.load(peer_data + (rank + ahead) % WORLD).to(out.dtype), 16)
        peers = peers + (tl.make_tensor_descriptor(to, [(STEPS - 1) * WORLD * padded, columns], [columns, 1], [BLOCK_M, STORE_N]),)  # type: ignore[assignment]
    _stagger(tl.program_id(0) * STAGGER)
    credits = tl.cast(0, tl.int64)
    row = rank * padded
    seen = -1
    pending = -1
    turn_of_all = claimed(claim(queues, THREADS))
    while turn_of_all < everything:
        for _ in range(BATCH):
            if turn_of_all < everything:
                kind, turn = _turn(turn_of_all, tiles_shard, tiles_part, tiles_n, WORLD, PARTS, LAG, COPY_LAG, STEPS)
                shard, m, n = arriving(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
                if kind == PEERS:
                    shard, m, n = departing(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
                if kind == OWN:
                    band = turn // (tiles_part * tiles_n)
                    m, n = grouped(turn - band * tiles_part * tiles_n, tl.minimum(tiles_shard - band * tiles_part, tiles_part), tiles_n, GROUP_M)
                    m += band * tiles_part
                    shard = rank
                part = m // tiles_part
                at_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
                at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
                inside = ((at_m < rows) & (shard * rows + at_m < limit))[:, None] & (at_n < columns)[None, :]
                offsets = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
                if kind != PEERS:
                    # The last tile of a band would be counted a whole matmul later, or never where this block waits for the peers.
                    pending = _flush(pending, queues, peer_flags, stop, call, rank, rows, tiles_part, tiles_n, tiles_shard, signals, WORLD, PARTS)
                if BROADCAST and kind == COPY:
                    following = claim(queues, THREADS)
                    if seen != shard * PARTS + part:
                        wait_at_least(signal_flag(flags, shard, PARTS + part, signals, WORLD), call + 1, stop, patience, site * WAIT_KINDS + WAIT_RESULT, shard)
                        seen = shard * PARTS + part
                    came = staging + (WORLD + shard).to(tl.int64) * padded * columns
                    finished_tile = tl.load(came + offsets, mask=inside, cache_modifier=".cg")
                    if EPILOGUE is not None:
                        to_m = shard * rows + at_m
                        finished_tile = EPILOGUE(finished_tile.to(tl.float32), 0, to_m, (at_m < rows) & (to_m < limit), at_n, columns, extra0, extra1).to(finished_tile.dtype)
                    tl.store(out + shard.to(tl.int64) * rows * columns + offsets, finished_tile, mask=inside)
                else:
                    total = multiply_tile(a_desc, b_desc, bias, shard * rows + m * BLOCK_M, n * BLOCK_N, inner, columns, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, BIAS)
                    following = claim(queues, THREADS)
                    pending = _flush(pending, queues, peer_flags, stop, call, rank, rows, tiles_part, tiles_n, tiles_shard, signals, WORLD, PARTS)
                    if kind == OWN:
                        if seen != rank * PARTS + part:
                            for step in range(1, WORLD):
                                source = (rank + step) % WORLD
                                wait_at_least(signal_flag(flags, source, part, signals, WORLD), call + 1, stop, patience, site * WAIT_KINDS + WAIT_PARTIALS, source)
                            seen = rank * PARTS + part
                        for step in range(1, WORLD):
                            came = staging + ((rank + step) % WORLD).to(tl.int64) * padded * columns
                            total += tl.load(came + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                        result = (total * scale).to(out.dtype.element_ty)
                        own = result
                        if EPILOGUE is not None:
                            first = rank * rows if BROADCAST else 0
                            own = by_quarters(EPILOGUE, result.to(tl.float32), 0, first + at_m, (at_m < rows) & (first + at_m < limit), n * BLOCK_N, columns, extra0, extra1, result.dtype)
                        tl.store(out + (rank.to(tl.int64) * rows * columns if BROADCAST else 0) + offsets, own, mask=inside)
                        if BROADCAST:
                            for ahead in tl.static_range(1, WORLD):
                                peer = (rank + ahead) % WORLD
                                wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
                                store_tile(peers[ahead - 1], tl.where(may_store(stop), (WORLD + rank) * padded + m * BLOCK_M, NOWHERE), n * BLOCK_N, result, HALVES)
                            pending = rank * PARTS + part
                    else:
                        if ((credits >> shard) & 1) == 0:
                            wait_at_least(credit_flag(flags, shard), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, shard)
                            credits = credits | (tl.cast(1, tl.int64) << shard)
                            row = tl.where(may_store(stop), rank * padded, NOWHERE)
                        partial = total.to(out.dtype.element_ty)
                        for ahead in tl.static_range(1, WORLD):
                            if shard == (rank + ahead) % WORLD:
                                store_tile(peers[ahead - 1], row + m * BLOCK_M, n * BLOCK_N, partial, HALVES)
                        pending = shard * PARTS + part
                turn_of_all = claimed(following)
    _flush(pending, queues, peer_flags, stop, call, rank, rows, tiles_part, tiles_n, tiles_shard, signals, WORLD, PARTS)

    tl.debug_barrier()
    finished = tl.atomic_add(queues + 1, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        tl.store(queues, 0)
        tl.store(queues + 1, 0)
        finish_call(calls, peer_flags, call, rank, WORLD)

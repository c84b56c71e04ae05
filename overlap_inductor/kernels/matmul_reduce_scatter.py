# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: ``reduce_scatter(a @ b)`` and ``all_to_all(a @ b)`` in one persistent kernel. A block sends each
tile of a peer's shard as soon as it has multiplied the tile.

A rank's product consists of one shard for each rank, and a shard consists of ``parts`` bands of rows. The order of
tiles:

1. Tiles of the peers' shards, band after band. Each tile goes to the workspace of the rank that owns its shard, in
   the collective's dtype. At any time, about equally many tiles are in transfer to each peer (``departing``).
2. This rank's own tiles. In a reduce-scatter, an own tile and all peers' partial sums of the tile are summed in fp32,
   and rounded once.

With ``EXCHANGES``, the kernel computes an all-to-all. An own tile is stored into the result. Blocks copy what the peers
have sent from the workspace into the result (``receive``). After each own tile, a block copies up to ``EARLY`` pieces.
The rest is copied when no tile is left.

A bulk store sends a tile out of shared memory, under the next tile's matmul. When the store is done, the tile is
counted (``_flush``). Each block starts ``STAGGER`` ns after the block before it. Otherwise all blocks would send, and
delay loads, at the same moments.

Forward progress, with any number of resident blocks. A wait that lasts too long times out (``signals``). Without a
fault, this does not happen, because what a block waits for always comes:

* Credits depend only on the previous call.
* An own tile of band ``p`` waits for the partial sums of band ``p`` from all peers. In a peer's queue, the tiles that
  the peer sends come before the peer's own tiles. So no tile that is sent waits for partial sums.
* In an all-to-all, a block claims a copy only after an own tile, or when no tile is left. By then, running blocks have
  claimed all tiles that the rank sends, and this block has counted those that it sent. So no peer waits for this block.

Memory ordering. Bulk stores are followed by ``store_fence``, then by ``count_and_signal``. The receiver waits for the
flag and loads by ordinary loads that bypass L1. The workspace is written again after the credits that the last block
gives. CUDA graphs: as in ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.epilogue import by_quarters
from overlap_inductor.kernels.receive import may_receive
from overlap_inductor.kernels.receive import receive_piece
from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import finish_call
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import store_fence
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import band_tiles
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import departing
from overlap_inductor.kernels.tile_order import multiply_tile
from overlap_inductor.kernels.tile_order import own_tile
from overlap_inductor.kernels.tile_order import store_tile

NOWHERE = tl.constexpr(2**30)
"""A row that no workspace has: a bulk store there stores nothing."""
SLEEPS = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _tile(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    """``(shard, m, n)`` of tile number ``turn``: first the peers' shards, then this rank's own."""
    others = tiles_shard * tiles_n * (WORLD - 1)
    shard, m, n = departing(tl.minimum(turn, others - 1), rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
    if turn >= others:
        shard = rank
        m, n = own_tile(turn - others, tiles_shard, tiles_part, tiles_n, GROUP_M)
    return shard, m, n


@triton.jit
def _stagger(nanoseconds):
    """Sleep, so that the blocks do not all send their tiles at the same moments."""
    if SLEEPS:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _flush(
    pending, queues, peer_flags, stop, call, rank, tiles_part, tiles_n, tiles_shard, signals, parts, WORLD: tl.constexpr
):
    """Wait until the bulk stores of a tile are done, and count the tile. ``pending``: ``shard * parts + band`` of the
    tile, or -1 for none. Returns the new ``pending``, -1."""
    if pending >= 0:
        store_fence()
        shard = pending // parts
        part = pending % parts
        flag = tl.load(peer_flags + shard).to(tl.pointer_type(tl.int32))
        target = band_tiles(part, tiles_shard, tiles_part, tiles_n)
        count_and_signal(
            queues + QUEUE_WORDS + pending, target, signal_flag(flag, rank, part, signals, WORLD), call + 1, stop
        )
    return -1


@triton.jit
def _sum_own(
    total, out, extra0, extra1, staging, flags, call, stop, patience, site, rank, m, n, part, seen, rows, columns,
    padded, signals, scale,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all peers to an own tile, apply the epilogue, and store the tile. ``seen``: the band for
    which the block has already waited."""
    if seen != part:
        for step in range(1, WORLD):
            source = (rank + step) % WORLD
            flag = signal_flag(flags, source, part, signals, WORLD)
            wait_at_least(flag, call + 1, stop, patience, site * WAIT_KINDS + WAIT_PARTIALS, source)
    at_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
    offsets = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
    for step in range(1, WORLD):
        came = staging + ((rank + step) % WORLD).to(tl.int64) * padded * columns
        total += tl.load(came + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    result = (total * unless_aborted(scale, stop)).to(out.dtype.element_ty)
    if EPILOGUE is not None:
        result = by_quarters(
            EPILOGUE,
            result.to(tl.float32),
            0,
            at_m,
            at_m < rows,
            n * BLOCK_N,
            columns,
            extra0,
            extra1,
            result.dtype,
        )
    tl.store(out + offsets, result, mask=inside)


@triton.jit(do_not_specialize=["rank", "site", "rows", "parts", "copies"])
def matmul_reduce_scatter(
    a_desc, b_desc, out, bias, extra0, extra1, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, columns, inner, part_rows, parts, signals, scale, copies,
    WORLD: tl.constexpr, STAGGER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BATCH: tl.constexpr,
    THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    EXCHANGES: tl.constexpr, BY_COLUMNS: tl.constexpr, EARLY: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks, ideally one per SM.

    Args: see ``kernels`` for those not listed.
        a_desc: ``[WORLD * rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``. With ``BY_COLUMNS``: ``[rows, inner]``.
        b_desc, bias, TRANSPOSED, BIAS: see ``multiply_tile``.
        out: this rank's shard of the result ``[rows, columns]``. With ``EXCHANGES``, a shard from each rank: ``[WORLD *
            rows, columns]``.
        rows, columns: sizes of a shard.
        EPILOGUE: is applied only to this rank's reduced result.
        staging: this rank's workspace ``[WORLD, padded, columns]`` of ``out``'s dtype. ``padded`` is ``rows`` rounded
            up to whole tiles.
        flags: ``signal_flag(s, i)`` is the flag of band ``i`` from source ``s``.
        queues: ``[QUEUE_WORDS + WORLD * parts]``. Words 0, 1 and 2 count tiles claimed, blocks that have finished, and
            copies claimed. Words from ``QUEUE_WORDS`` on count tiles stored.
        part_rows: number of rows of a band, a multiple of ``BLOCK_M``.
        parts: number of bands of a shard.
        BY_COLUMNS: with ``EXCHANGES``, a shard consists of columns of the product ``[rows, WORLD * columns]``.
        copies: with ``EXCHANGES``, the number of pieces into which a band of one peer is cut. A block copies a piece in
            steps of ``COPY`` int32 words.
        EARLY: with ``EXCHANGES``, largest number of pieces that a block copies after each own tile.
    """
    STORE_N: tl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    call = tl.load(calls)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    tiles_part = part_rows // BLOCK_M
    padded = tiles_shard * BLOCK_M
    everything = tiles_shard * tiles_n * WORLD
    # The compiler sees the factor 4, so it knows that no mask ends inside a 16-byte word.
    row_words = columns // 8 * 4
    peers = ()
    for ahead in tl.static_range(1, WORLD):
        to = tl.multiple_of(tl.load(peer_data + (rank + ahead) % WORLD).to(out.dtype), 16)
        peers = peers + (tl.make_tensor_descriptor(to, [WORLD * padded, columns], [columns, 1], [BLOCK_M, STORE_N]),)
    if EXCHANGES:
        own = out + tl.cast(rank, tl.int64) * rows * columns
        own_desc = tl.make_tensor_descriptor(own, [rows, columns], [columns, 1], [BLOCK_M, STORE_N])
        result = out.to(tl.pointer_type(tl.int32), bitcast=True)
        came = staging.to(tl.pointer_type(tl.int32), bitcast=True)
    _stagger(tl.program_id(0) * STAGGER)
    credits = tl.cast(0, tl.int64)
    row = rank * padded
    seen = -1
    pending = -1
    turn = claimed(claim(queues, THREADS))
    while turn < everything:
        for _ in range(BATCH):
            if turn < everything:
                shard, m, n = _tile(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
                if shard == rank:
                    # Peers need the last tile that was sent, so it is counted before this tile is multiplied.
                    pending = _flush(
                        pending,
                        queues,
                        peer_flags,
                        stop,
                        call,
                        rank,
                        tiles_part,
                        tiles_n,
                        tiles_shard,
                        signals,
                        parts,
                        WORLD,
                    )
                part = m // tiles_part
                total = multiply_tile(
                    a_desc,
                    b_desc,
                    bias,
                    m * BLOCK_M + (0 if BY_COLUMNS else shard * rows),
                    n * BLOCK_N + (shard * columns if BY_COLUMNS else 0),
                    inner,
                    columns * (WORLD if BY_COLUMNS else 1),
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    TRANSPOSED,
                    BIAS,
                )
                following = claim(queues, THREADS)
                pending = _flush(
                    pending,
                    queues,
                    peer_flags,
                    stop,
                    call,
                    rank,
                    tiles_part,
                    tiles_n,
                    tiles_shard,
                    signals,
                    parts,
                    WORLD,
                )
                if shard == rank:
                    if EXCHANGES:
                        store_tile(own_desc, m * BLOCK_M, n * BLOCK_N, total.to(out.dtype.element_ty), HALVES)
                        if EARLY > 0:
                            ready = may_receive(queues + 2, flags, call, rank, signals, parts, copies, WORLD)
                            for _ in range(EARLY):
                                if ready:
                                    receive_piece(
                                        result, came, queues + 2, flags, call, stop, patience, site, rank, signals,
                                        parts, copies, rows * row_words, padded * row_words, part_rows * row_words,
                                        WORLD, COPY,
                                    )  # fmt: skip
                                    ready = may_receive(queues + 2, flags, call, rank, signals, parts, copies, WORLD)
                    else:
                        _sum_own(
                            total, out, extra0, extra1, staging, flags, call, stop, patience, site, rank, m, n, part,
                            seen, rows, columns, padded, signals, scale,
                            WORLD, BLOCK_M, BLOCK_N, EPILOGUE,
                        )  # fmt: skip
                        seen = part
                else:
                    if ((credits >> shard) & 1) == 0:
                        wait_at_least(
                            credit_flag(flags, shard), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, shard
                        )
                        credits = credits | (tl.cast(1, tl.int64) << shard)
                        row = tl.where(may_store(stop), rank * padded, NOWHERE)
                    partial = total.to(out.dtype.element_ty)
                    for ahead in tl.static_range(1, WORLD):
                        if shard == (rank + ahead) % WORLD:
                            store_tile(peers[ahead - 1], row + m * BLOCK_M, n * BLOCK_N, partial, HALVES)
                    pending = shard * parts + part
                turn = claimed(following)
    _flush(pending, queues, peer_flags, stop, call, rank, tiles_part, tiles_n, tiles_shard, signals, parts, WORLD)

    if EXCHANGES:
        receiving = True
        while receiving:
            receiving = receive_piece(
                result, came, queues + 2, flags, call, stop, patience, site, rank, signals,
                parts, copies, rows * row_words, padded * row_words, part_rows * row_words,
                WORLD, COPY,
            )  # fmt: skip

    tl.debug_barrier()
    finished = tl.atomic_add(queues + 1, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        for word in tl.static_range(3):
            tl.store(queues + word, 0)
        finish_call(calls, peer_flags, call, rank, stop, WORLD)

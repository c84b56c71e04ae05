# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: ``all_reduce(a @ b)`` in one persistent kernel. Some blocks send and sum tiles while the
others multiply.

If a block sent each tile right after its matmul, as in ``matmul_reduce_scatter``, the block's next loads would wait for
the link. Here a block stores each tile to this rank's ``product``, in the collective's dtype, and pushing blocks send
the tile. There are four kinds of work. Each kind has a queue, in which work of earlier bands comes first::

    tile    multiply a tile of any rank's shard into ``product``; in a band the peers' shards come first, the own last
    push    copy ``UNIT`` neighbouring tiles of a peer's shard from ``product`` to that peer's workspace;
            at any time about equally many tiles go to each peer (``departing``)
    sum     add the partial sums that the peers sent for a tile of the own shard to the own product, in fp32, and
            round once; store the sum into ``out`` and to all peers
    copy    copy a finished tile of a peer's shard from the workspace into ``out``

The first ``PUSHERS`` blocks push from the beginning. On 8 H200s, eight SMs that store to all peers fill a GPU's links.
Each block runs this loop::

    while there is work:
        if this block pushes, or all tiles are taken:
            for each kind of work among push, sum and copy, in this order:
                claim work of this kind if the block holds none
                if all tiles are taken, wait until this work is ready
                if this work is ready: do it, and begin again
        if a tile is left: multiply it

Forward progress, with any number of resident blocks. All waits are bounded (``signals``), but none
relies on its bound to end:

* Credits depend only on the previous call.
* Every other wait begins when all tiles are taken. Each tile is then finished, or is held by a block that multiplies it
  before that block waits.
* A push waits only for credits and for tiles of this rank. So all pushes end.
* A sum waits for credits, for its own tile, and for the pushes of its band on all ranks. A block waits until its
  sum is ready only when no push is left to claim. So all sums end.
* A copy waits for the sums of its band on one peer. A block waits until its copy is ready only when no sum is left
  to claim. So all copies end.

Memory ordering. After a tile's bulk stores come ``store_fence``, a barrier, and one thread's releasing add to a word of
``ready`` (GPU scope). A block that sends or sums the tile acquires that word, clears it, and loads the tile. These
loads bypass L1.
Stores to peers are ordinary stores, followed by ``count_and_signal``. Peers write into this rank's workspace again only
after the credits that this rank's last block gives.

If shards are whole tiles, ``product`` may be the same memory as ``out``:

* A copy overwrites partial sums of a peer's tile. It has waited for the peer's finished band, so the peer has received
  all these partial sums.
* A sum overwrites the own product of the same tile. The threads that store the sum have read this product before.

CUDA graphs: as in ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import WAIT_RESULT
from overlap_inductor.kernels.signals import WAIT_TILES
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import count_and_signal_all
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import finish_call
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import reached
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import store_fence
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import arriving
from overlap_inductor.kernels.tile_order import band_tiles
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import departing
from overlap_inductor.kernels.tile_order import multiply_tile
from overlap_inductor.kernels.tile_order import own_tile
from overlap_inductor.kernels.tile_order import store_tile

PUSH_QUEUE = tl.constexpr(2)
SUM_QUEUE = tl.constexpr(3)
COPY_QUEUE = tl.constexpr(4)
NOTHING_QUEUE = tl.constexpr(6)
"""Words of ``queues``. After a tile, a pushing block claims from ``NOTHING_QUEUE`` and ignores the answer."""


@triton.jit
def _tile(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    """``(shard, m, n)`` of the tile that the matmul takes after ``turn`` others. Bands come one after the other; in
    each band, this rank's own shard is last."""
    whole = tiles_part * tiles_n * WORLD
    band = turn // whole
    rest = turn - band * whole
    peers = band_tiles(band, tiles_shard, tiles_part, tiles_n) * (WORLD - 1)
    shard, m, n = departing(
        band * tiles_part * tiles_n * (WORLD - 1) + tl.minimum(rest, peers - 1),
        rank,
        tiles_shard,
        tiles_part,
        tiles_n,
        WORLD,
        GROUP_M,
    )
    if rest >= peers:
        shard = rank
        m, n = own_tile(band * tiles_part * tiles_n + rest - peers, tiles_shard, tiles_part, tiles_n, GROUP_M)
    return shard, m, n


@triton.jit
def _is_there(flag, target):
    """Whether a flag has reached ``target``, with the same answer for all threads. If so, the data that were written
    before the flag may be loaded."""
    there = reached(tl.atomic_add(flag, 0, sem="acquire", scope="sys"), target)
    tl.debug_barrier()
    return there


@triton.jit
def _flush(
    sent, queues, peer_flags, stop, call, rank, tiles_shard, tiles_part, units_n, signals, parts, WORLD: tl.constexpr
):
    """Count a push whose stores have been started. ``sent``: ``shard * parts + band`` of the push, or -1 for none.
    Returns -1, the new ``sent``."""
    if sent >= 0:
        shard = sent // parts
        part = sent % parts
        flag = signal_flag(tl.load(peer_flags + shard).to(tl.pointer_type(tl.int32)), rank, part, signals, WORLD)
        count_and_signal(
            queues + QUEUE_WORDS + sent, band_tiles(part, tiles_shard, tiles_part, units_n), flag, call + 1, stop
        )
    return -1


@triton.jit
def _places(row, column, columns, limit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets and mask of a tile in rows of ``columns`` elements. The mask leaves out the columns from ``limit`` on."""
    at_n = column + tl.arange(0, BLOCK_N)
    return (row + tl.arange(0, BLOCK_M))[:, None].to(tl.int64) * columns + at_n[None, :], (at_n < limit)[None, :]


@triton.jit
def _sum_tile(
    product, out, extra0, extra1, staging, peer_data, stop, m, n, rank, rows, limit, columns, padded, scale,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLAB: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Sum tile ``(m, n)`` of this rank's own shard, and store it into ``out`` and into every peer's workspace. The
    epilogue is applied only to what goes to ``out``."""
    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = at_n < columns
    allowed = inside_n & may_store(stop)
    scale = unless_aborted(scale, stop)
    first_row = rank * rows
    for first in range(m * BLOCK_M, m * BLOCK_M + BLOCK_M, SLAB):
        at_m = first + tl.arange(0, SLAB)
        inside_m = (at_m < rows) & (rank * rows + at_m < limit)
        inside = inside_m[:, None] & inside_n[None, :]
        at = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
        total = tl.load(
            product + rank.to(tl.int64) * padded * columns + at, mask=inside, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        for step in tl.static_range(1, WORLD):
            came = staging + ((rank + step) % WORLD).to(tl.int64) * padded * columns
            total += tl.load(came + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        result = (total * scale).to(out.dtype.element_ty)
        own = result
        if EPILOGUE is not None:
            own = EPILOGUE(result.to(tl.float32), 0, first_row + at_m, inside_m, at_n, columns, extra0, extra1).to(
                result.dtype
            )
        tl.store(out + tl.cast(first_row, tl.int64) * columns + at, own, mask=inside)
        for step in tl.static_range(1, WORLD):
            to = tl.multiple_of(tl.load(peer_data + (rank + step) % WORLD).to(out.dtype), 16)
            tl.store(
                to + (WORLD + rank).to(tl.int64) * padded * columns + at,
                result,
                mask=inside_m[:, None] & allowed[None, :],
            )


@triton.jit
def _copy_tile(
    finished,
    out,
    extra0,
    extra1,
    stop,
    m,
    n,
    first_row,
    rows,
    limit,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLAB: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Copy tile ``(m, n)`` of a peer's finished shard into ``out``, and apply the epilogue on the way. ``first_row``:
    the shard's first row in ``out``."""
    one = unless_aborted(1.0, stop)
    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(m * BLOCK_M, m * BLOCK_M + BLOCK_M, SLAB):
        at_m = first + tl.arange(0, SLAB)
        inside_m = (at_m < rows) & (first_row + at_m < limit)
        inside = inside_m[:, None] & (at_n < columns)[None, :]
        at = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
        came = tl.load(finished + at, mask=inside, cache_modifier=".cg")
        came = (came.to(tl.float32) * one).to(came.dtype)
        if EPILOGUE is not None:
            came = EPILOGUE(came.to(tl.float32), 0, first_row + at_m, inside_m, at_n, columns, extra0, extra1).to(
                came.dtype
            )
        tl.store(out + tl.cast(first_row, tl.int64) * columns + at, came, mask=inside)


@triton.jit
def _credited(credits, peer, flags, call, stop, patience, site):
    """Wait until ``peer`` has ended the calls before this one, unless its bit in ``credits`` is set. Returns
    ``credits`` with this bit set."""
    if ((credits >> peer) & 1) == 0:
        wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
    return credits | (tl.cast(1, tl.int64) << peer)


@triton.jit(do_not_specialize=["rank", "site", "rows", "limit", "parts"])
def matmul_all_reduce(
    a_desc, b_desc, product_desc, product, out, bias, extra0, extra1,
    ready, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, limit, columns, inner, part_rows, parts, signals, scale,
    WORLD: tl.constexpr, PUSHERS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SLAB: tl.constexpr,
    THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks, ideally one per SM.

    Args: see ``kernels`` for those not listed.
        a_desc: ``[limit, inner]``, blocks ``[BLOCK_M, BLOCK_K]``.
        b_desc, bias, TRANSPOSED, BIAS: see ``multiply_tile``.
        product, product_desc: ``[WORLD * padded, columns]`` of ``out``'s dtype; ``padded`` is ``rows`` rounded up to
            whole tiles. Blocks ``[BLOCK_M, BLOCK_N]``, half as wide with ``HALVES``.
        ready: int32, one word for each tile of ``product``, zero between calls. In a peer's shard, the word of the
            first of ``UNIT`` tiles counts the written tiles among them. In the own shard, a word says whether its tile
            is written.
        out: this rank's result, all shards ``[limit, columns]``.
        rows, limit: rows of a shard, and of all shards together. The last shards may be short.
        staging: this rank's workspace, in the dtype of ``out``: partial sums from each source, ``[WORLD, padded,
            columns]``, then the finished shards in the same shape.
        flags: ``signal_flag(s, i)``: partial sums of band ``i`` from source ``s``. ``signal_flag(s, parts + i)``:
            finished band ``i`` of rank ``s``.
        part_rows, parts: rows of a band, a multiple of ``BLOCK_M``; bands of a shard.
        queues: ``[QUEUE_WORDS + (WORLD + 1) * parts]``. Words 0 to 4 count claimed tiles, finished blocks,
            claimed pushes, claimed sums and claimed copies. Word 6: ``NOTHING_QUEUE``. Words from ``QUEUE_WORDS`` on
            count this rank's stored pushes to each rank, by band, then its stored sums of each band.
        SLAB: rows of a tile that are summed or copied at once.
    """
    call = tl.load(calls)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    tiles_part = part_rows // BLOCK_M
    padded = tiles_shard * BLOCK_M
    units_n = tl.cdiv(tiles_n, UNIT)
    sums = tiles_shard * tiles_n
    pushes = tiles_shard * units_n * (WORLD - 1)
    tiles = sums * WORLD
    copies = sums * (WORLD - 1)
    pushes_first = tl.program_id(0) < PUSHERS
    tile = -1
    push = -1
    sum_turn = -1
    copy = -1
    partials = -1
    sent = -1
    credits = tl.cast(0, tl.int64)
    busy = 1
    while busy != 0:
        worked = 0
        if pushes_first | (tile >= tiles):
            if push < 0:
                push = tl.atomic_add(queues + PUSH_QUEUE, 1, sem="relaxed")
            if push < pushes:
                shard, m, n = departing(push, rank, tiles_shard, tiles_part, units_n, WORLD, GROUP_M)
                n *= UNIT
                word = ready + (shard * tiles_shard + m) * tiles_n + n
                wanted = tl.minimum(tiles_n - n, UNIT)
                if _is_there(word, wanted):
                    worked = 1
                elif tile >= tiles:
                    sent = _flush(
                        sent,
                        queues,
                        peer_flags,
                        stop,
                        call,
                        rank,
                        tiles_shard,
                        tiles_part,
                        units_n,
                        signals,
                        parts,
                        WORLD,
                    )
                    wait_at_least(word, wanted, stop, patience, site * WAIT_KINDS + WAIT_TILES, rank)
                    worked = 1
                if worked != 0:
                    following_push = claim(queues + PUSH_QUEUE, THREADS)
                    tl.store(word, 0)
                    credits = _credited(credits, shard, flags, call, stop, patience, site)
                    source = product + shard.to(tl.int64) * padded * columns
                    to = (
                        tl.multiple_of(tl.load(peer_data + shard).to(out.dtype), 16)
                        + rank.to(tl.int64) * padded * columns
                    )
                    # If the credit did not arrive, nothing is stored.
                    end = tl.where(may_store(stop), tl.minimum((n + UNIT) * BLOCK_N, columns), 0)
                    at, inside = _places(m * BLOCK_M, n * BLOCK_N, columns, end, BLOCK_M, BLOCK_N)
                    moved = tl.load(source + at, mask=inside, cache_modifier=".cg")
                    # ``_flush`` waits until the previous push's stores have arrived. The look at ``word``, the claim
                    # and the load above come before it, so that they run while these stores travel.
                    sent = _flush(
                        sent,
                        queues,
                        peer_flags,
                        stop,
                        call,
                        rank,
                        tiles_shard,
                        tiles_part,
                        units_n,
                        signals,
                        parts,
                        WORLD,
                    )
                    tl.store(to + at, moved, mask=inside)
                    for column in range((n + 1) * BLOCK_N, (n + UNIT) * BLOCK_N, BLOCK_N):
                        at, inside = _places(m * BLOCK_M, column, columns, end, BLOCK_M, BLOCK_N)
                        tl.store(to + at, tl.load(source + at, mask=inside, cache_modifier=".cg"), mask=inside)
                    sent = shard * parts + m // tiles_part
                    push = claimed(following_push)
            if worked == 0:
                sent = _flush(
                    sent, queues, peer_flags, stop, call, rank, tiles_shard, tiles_part, units_n, signals, parts, WORLD
                )
                if sum_turn < 0:
                    sum_turn = tl.atomic_add(queues + SUM_QUEUE, 1, sem="relaxed")
                if sum_turn < sums:
                    m, n = own_tile(sum_turn, tiles_shard, tiles_part, tiles_n, GROUP_M)
                    part = m // tiles_part
                    word = ready + (rank * tiles_shard + m) * tiles_n + n
                    if tile >= tiles:
                        wait_at_least(word, 1, stop, patience, site * WAIT_KINDS + WAIT_TILES, rank)
                        if partials < part:
                            for step in range(1, WORLD):
                                source = (rank + step) % WORLD
                                wait_at_least(
                                    signal_flag(flags, source, part, signals, WORLD),
                                    call + 1,
                                    stop,
                                    patience,
                                    site * WAIT_KINDS + WAIT_PARTIALS,
                                    source,
                                )
                            partials = part
                        worked = 1
                    elif _is_there(word, 1):
                        if partials < part:
                            came = 1
                            while (came > 0) & (came < WORLD):
                                came = tl.where(
                                    _is_there(
                                        signal_flag(flags, (rank + came) % WORLD, part, signals, WORLD), call + 1
                                    ),
                                    came + 1,
                                    0,
                                )
                            if came != 0:
                                partials = part
                        if partials >= part:
                            worked = 1
                    if worked != 0:
                        sum_turn = -1
                        tl.store(word, 0)
                        for step in range(1, WORLD):
                            credits = _credited(credits, (rank + step) % WORLD, flags, call, stop, patience, site)
                        _sum_tile(
                            product, out, extra0, extra1, staging, peer_data, stop,
                            m, n, rank, rows, limit, columns, padded, scale,
                            WORLD, BLOCK_M, BLOCK_N, SLAB, EPILOGUE,
                        )  # fmt: skip
                        counter = queues + QUEUE_WORDS + WORLD * parts + part
                        count_and_signal_all(
                            counter,
                            band_tiles(part, tiles_shard, tiles_part, tiles_n),
                            peer_flags,
                            rank,
                            parts + part,
                            signals,
                            call + 1,
                            stop,
                            WORLD,
                        )
            if worked == 0:
                if copy < 0:
                    copy = tl.atomic_add(queues + COPY_QUEUE, 1, sem="relaxed")
                if copy < copies:
                    shard, m, n = arriving(copy, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
                    flag = signal_flag(flags, shard, parts + m // tiles_part, signals, WORLD)
                    if tile >= tiles:
                        wait_at_least(flag, call + 1, stop, patience, site * WAIT_KINDS + WAIT_RESULT, shard)
                        worked = 1
                    elif _is_there(flag, call + 1):
                        worked = 1
                    if worked != 0:
                        copy = -1
                        finished = staging + (WORLD + shard).to(tl.int64) * padded * columns
                        _copy_tile(
                            finished,
                            out,
                            extra0,
                            extra1,
                            stop,
                            m,
                            n,
                            shard * rows,
                            rows,
                            limit,
                            columns,
                            BLOCK_M,
                            BLOCK_N,
                            SLAB,
                            EPILOGUE,
                        )
        if worked == 0:
            if tile < 0:
                tile = tl.atomic_add(queues, 1, sem="relaxed")
            if tile < tiles:
                shard, m, n = _tile(tile, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
                total = multiply_tile(
                    a_desc,
                    b_desc,
                    bias,
                    shard * rows + m * BLOCK_M,
                    n * BLOCK_N,
                    inner,
                    columns,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    TRANSPOSED,
                    BIAS,
                )
                # A pushing block may do other work before its next tile. If it claimed the tile here, other blocks
                # would wait for the tile during this work. So it claims from ``NOTHING_QUEUE``.
                following = claim(queues + tl.where(pushes_first, NOTHING_QUEUE, 0), THREADS)
                store_tile(
                    product_desc, shard * padded + m * BLOCK_M, n * BLOCK_N, total.to(out.dtype.element_ty), HALVES
                )
                store_fence()
                tl.debug_barrier()
                unit = tl.where(shard == rank, n, n // UNIT * UNIT)
                tl.atomic_add(ready + (shard * tiles_shard + m) * tiles_n + unit, 1, sem="release", scope="gpu")
                tile = tl.where(pushes_first, -1, claimed(following))
            elif (push >= pushes) & (sum_turn >= sums) & (copy >= copies):
                busy = 0

    tl.debug_barrier()
    ended = tl.atomic_add(queues + 1, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        for queue in range(QUEUE_WORDS - 1):
            tl.store(queues + queue, 0)
        finish_call(calls, peer_flags, call, rank, stop, WORLD)

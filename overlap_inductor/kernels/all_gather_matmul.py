# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: ``all_gather(a) @ b`` in one persistent kernel. With ``SCATTERED``, a rank sends a different
shard to each rank, and the kernel computes ``all_to_all(a) @ b``. (If the matmul contracts the exchanged dim, see
``all_to_all_contraction``.)

A shard has ``PARTS`` parts, each with a flag at the receiver. To *push* is to store one of the ``PIECES`` pieces of a
part at a receiver. Blocks claim work from three queues: pieces to send, own tiles, and tiles of peers. ::

    the first ``PUSHERS`` blocks: while pieces are left, store a piece into a peer's workspace
    all blocks:
        multiply tiles of this rank's own shard, which is read in place
        multiply tiles of the peers' shards, in a fixed order in which their parts are expected to arrive:
            until the part has arrived, push pieces, or wait if none is left
        push the pieces that are left

Without ``SENDS`` no block pushes: a transport that needs no SM sends the shard (``copy_engine``).

Forward progress. Before a block waits for a peer's part, every outgoing piece of its own rank has been claimed. A push
waits only for a peer's credit, which depends only on the previous call. So one resident block on each rank is enough.
All waits are bounded (``signals``).

Memory ordering. A piece is stored by ordinary stores of one block and counted (``count_and_signal``). The receiver
waits for the part's flag and then runs ``load_fence``, because it reads by bulk loads. A peer writes into this rank's
workspace again only after this rank's credit. The last block gives the credit when all blocks have finished, and resets
the queues. With ``KEEP``, a later kernel gives the credit: ``signals.end_call`` or ``transfer.end_call_and_spoil``.

CUDA graphs: as in ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.epilogue import by_quarters
from overlap_inductor.kernels.push import push_piece
from overlap_inductor.kernels.push import push_until
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PART
from overlap_inductor.kernels.signals import finish_call
from overlap_inductor.kernels.signals import load_fence
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import arriving
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import grouped
from overlap_inductor.kernels.tile_order import multiply_tile
from overlap_inductor.kernels.tile_order import store_tile


@triton.jit(do_not_specialize=["rank", "site", "rows", "shard_vectors"])
def all_gather_matmul(
    own_desc, a,
    b0_desc, c0_desc, c0, bias0, b1_desc, c1_desc, c1, bias1, b2_desc, c2_desc, c2, bias2, b3_desc, c3_desc, c3, bias3,
    extra0, extra1,
    columns0, columns1, columns2, columns3, gathered_desc, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, inner, shard_vectors, part_rows, part_vectors, signals,
    COUNT: tl.constexpr, WORLD: tl.constexpr, PARTS: tl.constexpr, SENDS: tl.constexpr, PIECES: tl.constexpr,
    PUSHERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr,
    BATCH: tl.constexpr, THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIASES: tl.constexpr,
    EPILOGUE: tl.constexpr, KEEP: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """``c_i[WORLD * rows, columns_i] = gathered @ b_i + bias_i`` for ``COUNT`` weights. Grid: any number of blocks,
    ideally one per SM.

    Args: see ``kernels`` for those not listed.
        own_desc: this rank's shard ``[rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``. With ``SCATTERED``, the shard that
            this rank sends to itself.
        a, shard_vectors: the shard's address, and its size in 16-byte words.
        SCATTERED: ``a`` holds a shard for each rank, in the order of ranks.
        gathered_desc: this rank's workspace ``[WORLD * rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``. The rows of this
            rank's own shard are not read.
        b0_desc, ..., bias0, ..., TRANSPOSED: see ``multiply_tile``. All weights have one layout. The arguments of the
            weights ``COUNT`` to 3 are ``None``.
        BIASES: bit ``i``: weight ``i`` has a bias (else ``bias_i`` is any address).
        c0, ...: row-major outputs, fp16 or bf16.
        c0_desc, ...: the outputs, blocks ``[BLOCK_M, BLOCK_N]``, or half as wide with ``HALVES``.
        KEEP: the workspace holds the whole gathered tensor until a later kernel ends the call.
        flags: ``signal_flag(s, i)`` is the flag of part ``i`` from rank ``s``.
        queues: ``[QUEUE_WORDS + WORLD * PARTS]``. Words 0 to 3 count claimed pieces, claimed own tiles, claimed tiles
            of peers, and finished blocks. Words from ``QUEUE_WORDS`` on count stored pieces.
        part_rows: rows of a part, a multiple of ``BLOCK_M``.
        part_vectors: 16-byte words of a part.
    """
    call = tl.load(calls)
    words = a.to(tl.pointer_type(tl.int32), bitcast=True)
    # The compiler sees the factor 4 of both counts, so it knows that no mask ends inside a 16-byte word.
    shard_words = shard_vectors * 4
    part_words = part_vectors * 4
    weights = (
        (b0_desc, c0_desc, c0, bias0, columns0), (b1_desc, c1_desc, c1, bias1, columns1),
        (b2_desc, c2_desc, c2, bias2, columns2), (b3_desc, c3_desc, c3, bias3, columns3),
    )  # fmt: skip
    tiles_n = 0
    for w in tl.static_range(COUNT):
        tiles_n += tl.cdiv(weights[w][4], BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    if SENDS:
        sending = tl.program_id(0) < PUSHERS
        while sending:
            sending = push_piece(
                words,
                peer_data,
                peer_flags,
                flags,
                queues,
                call,
                shard_words,
                part_words,
                rank,
                site,
                stop,
                patience,
                signals,
                WORLD,
                PARTS,
                PIECES,
                BLOCK,
                KEEP,
                SCATTERED,
            )

    turn = claimed(claim(queues + 1, THREADS))
    while turn < tiles_shard * tiles_n:
        for _ in range(BATCH):
            if turn < tiles_shard * tiles_n:
                m, n = grouped(turn, tiles_shard, tiles_n, GROUP_M)
                b_desc, c_desc, c, bias, columns, biased, weight, n = _weight_of(weights, n, COUNT, BIASES, BLOCK_N)
                total = multiply_tile(
                    own_desc,
                    b_desc,
                    bias,
                    m * BLOCK_M,
                    n * BLOCK_N,
                    inner,
                    biased,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    TRANSPOSED,
                    BIASES > 0,
                )
                following = claim(queues + 1, THREADS)
                _store(
                    c_desc,
                    c,
                    total,
                    extra0,
                    extra1,
                    weight,
                    rank,
                    m,
                    n,
                    rows,
                    columns,
                    BLOCK_M,
                    BLOCK_N,
                    HALVES,
                    EPILOGUE,
                )
                turn = claimed(following)

    turn = claimed(claim(queues + 2, THREADS))
    seen = -1
    while turn < tiles_shard * tiles_n * (WORLD - 1):
        for _ in range(BATCH):
            if turn < tiles_shard * tiles_n * (WORLD - 1):
                shard, m, n = arriving(turn, rank, tiles_shard, part_rows // BLOCK_M, tiles_n, WORLD, GROUP_M)
                part = m // (part_rows // BLOCK_M)
                if shard * PARTS + part != seen:
                    seen = shard * PARTS + part
                    flag = signal_flag(flags, shard, part, signals, WORLD)
                    if SENDS:
                        push_until(
                            flag, call + 1, words, peer_data, peer_flags, flags, queues, call, shard_words, part_words,
                            rank, site, stop, patience, signals, WORLD, PARTS, PIECES, BLOCK, KEEP, SCATTERED,
                        )  # fmt: skip
                    wait_at_least(flag, call + 1, stop, patience, site * WAIT_KINDS + WAIT_PART, shard)
                    load_fence()
                one = unless_aborted(1.0, stop)
                b_desc, c_desc, c, bias, columns, biased, weight, n = _weight_of(weights, n, COUNT, BIASES, BLOCK_N)
                total = multiply_tile(
                    gathered_desc,
                    b_desc,
                    bias,
                    shard * rows + m * BLOCK_M,
                    n * BLOCK_N,
                    inner,
                    biased,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    TRANSPOSED,
                    BIASES > 0,
                )
                total *= one
                following = claim(queues + 2, THREADS)
                _store(
                    c_desc,
                    c,
                    total,
                    extra0,
                    extra1,
                    weight,
                    shard,
                    m,
                    n,
                    rows,
                    columns,
                    BLOCK_M,
                    BLOCK_N,
                    HALVES,
                    EPILOGUE,
                )
                turn = claimed(following)

    if SENDS:
        sending = True
        while sending:
            sending = push_piece(
                words,
                peer_data,
                peer_flags,
                flags,
                queues,
                call,
                shard_words,
                part_words,
                rank,
                site,
                stop,
                patience,
                signals,
                WORLD,
                PARTS,
                PIECES,
                BLOCK,
                KEEP,
                SCATTERED,
            )

    last_block_ends(queues, calls, peer_flags, call, rank, stop, WORLD, KEEP)


@triton.jit
def last_block_ends(queues, calls, peer_flags, call, rank, stop, WORLD: tl.constexpr, KEEP: tl.constexpr):
    """Count the calling block as finished. The last block to finish sets words 0 to 4 of ``queues`` to 0 (only
    ``all_gather_matmul_slices`` uses word 4). Without ``KEEP``, this block also ends the call."""
    tl.debug_barrier()
    finished = tl.atomic_add(queues + 3, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        for word in tl.static_range(5):
            tl.store(queues + word, 0)
        if not KEEP:
            finish_call(calls, peer_flags, call, rank, stop, WORLD)


@triton.jit
def _weight_of(weights, n, COUNT: tl.constexpr, BIASES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight of tile column ``n``, which counts across all weights. Returns ``(b_desc, c_desc, c, bias, columns,
    columns of the bias, number of the weight, tile column of that weight)``.

    The weight is selected before the loop over K. Two pipelined loops, one in each branch of an ``if``, would both hold
    shared memory.
    """
    b_desc, c_desc, c, bias, columns = weights[0]
    biased = columns * (BIASES & 1)
    weight = 0
    first = 0
    before = 0
    for w in tl.static_range(1, COUNT):
        before += tl.cdiv(weights[w - 1][4], BLOCK_N)
        if n >= before:
            b_desc, c_desc, c, bias, columns = weights[w]
            biased = columns * (BIASES >> w & 1)
            weight = w
            first = before
    return b_desc, c_desc, c, bias, columns, biased, weight, n - first


@triton.jit
def _store(
    c_desc,
    c,
    total,
    extra0,
    extra1,
    weight,
    shard,
    m,
    n,
    rows,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute the epilogue on one tile of the result, and store the tile. Its rows beyond the end of the shard are not
    stored."""
    at_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = total.to(c.dtype.element_ty)
    if EPILOGUE is not None:
        tile = by_quarters(
            EPILOGUE,
            tile.to(tl.float32),
            weight,
            shard * rows + at_m,
            at_m < rows,
            n * BLOCK_N,
            columns,
            extra0,
            extra1,
            c.dtype.element_ty,
        )
    if (m + 1) * BLOCK_M <= rows:
        store_tile(c_desc, shard * rows + m * BLOCK_M, n * BLOCK_N, tile, HALVES)
    else:
        to = c + (shard * rows + at_m)[:, None].to(tl.int64) * columns + at_n[None, :]
        tl.store(to, tile, mask=(at_m < rows)[:, None] & (at_n < columns)[None, :])

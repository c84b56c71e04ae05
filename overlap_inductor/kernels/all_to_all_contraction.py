# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: ``all_to_all(a) @ b`` in one persistent kernel, for a matmul that contracts the exchanged dim. An
example is the output projection of Ulysses attention: each peer sends its own heads of this rank's tokens.

A tile of the result is a sum over the sources: all ranks, each with a part of K. The sum is in fp32, and rounded once.
This rank's own part of K comes first and is read in place. Then come the parts of ranks ``rank + 1``, ``rank + 2``, ...
All ranks send, and multiply, one band of rows after the other. So later bands arrive while earlier bands are
multiplied.

The first ``PUSHERS`` blocks push before they multiply: they store this rank's rows into the peers' memory (``push``).
If a block's next rows have not arrived, it pushes pieces that no block has claimed yet. Without ``SENDS`` no block
pushes: a transport that needs no SM sends the rows (``copy_engine``).

A wait interrupts the pipelined loads of a loop. So only a block's first tile of a band has a loop for each source. For
its other tiles of the band, the rows of all sources have arrived, and one loop reads the parts of all peers.

Forward progress, memory ordering, CUDA graphs: as in ``all_gather_matmul``. A ``load_fence`` follows each wait. The
fences of the first tile of a band also precede the loads of the block's other tiles of this band.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.all_gather_matmul import last_block_ends
from overlap_inductor.kernels.push import push_piece
from overlap_inductor.kernels.push import push_until
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PART
from overlap_inductor.kernels.signals import load_fence
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import own_tile
from overlap_inductor.kernels.tile_order import store_tile


@triton.jit(do_not_specialize=["rank", "site", "rows", "shard_vectors"])
def all_to_all_contraction(
    own_desc, a, b_desc, c_desc, c, bias, gathered_desc, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, inner, columns, shard_vectors, part_rows, part_vectors, signals,
    WORLD: tl.constexpr, PARTS: tl.constexpr, SENDS: tl.constexpr, PIECES: tl.constexpr, PUSHERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr,
    BATCH: tl.constexpr, THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """``c[rows, columns] = sum over sources s of received[s] @ b[s * inner : (s + 1) * inner] + bias``. Grid: any
    number of blocks, ideally one per SM.

    Args: see ``all_gather_matmul`` for those not listed.
        own_desc: the shard that this rank sends to itself, ``[rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``.
        a: the address of the shards ``[WORLD, rows, inner]``, one for each rank.
        shard_vectors: size of a shard in 16-byte words.
        b_desc, bias, TRANSPOSED, BIAS: see ``tile_order.multiply_tile``; K is ``WORLD * inner``, in the order of ranks.
        c_desc: ``[rows, columns]``, fp16 or bf16, blocks ``[BLOCK_M, BLOCK_N]``, or half as wide with ``HALVES``.
        c: any pointer to the dtype of ``c_desc``; never stored to.
        inner: K of a shard, a multiple of ``BLOCK_K``, so each block of ``b`` belongs to one source.
    """
    call = tl.load(calls)
    words = a.to(tl.pointer_type(tl.int32), bitcast=True)
    # The compiler sees the factor 4 of both counts, so it knows that no mask ends inside a 16-byte word.
    shard_words = shard_vectors * 4
    part_words = part_vectors * 4
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_part = part_rows // BLOCK_M
    steps = inner // BLOCK_K
    if SENDS:
        sending = tl.program_id(0) < PUSHERS
        while sending:
            sending = push_piece(
                words, peer_data, peer_flags, flags, queues, call, shard_words, part_words, rank, site, stop, patience,
                signals, WORLD, PARTS, PIECES, BLOCK, KEEP, True,
            )  # fmt: skip

    turn = claimed(claim(queues + 1, THREADS))
    seen = -1
    while turn < tiles_m * tiles_n:
        for _ in range(BATCH):
            if turn < tiles_m * tiles_n:
                m, n = own_tile(turn, tiles_m, tiles_part, tiles_n, GROUP_M)
                part = m // tiles_part
                total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                # Loops over K: this rank's own part, then all peers' parts if they have arrived, else each peer's part.
                for i in range(tl.where(part == seen, 2, WORLD)):
                    first = i
                    last = tl.where((part == seen) & (i > 0), WORLD, i + 1)
                    if (i > 0) & (part != seen):
                        source = (rank + i) % WORLD
                        flag = signal_flag(flags, source, part, signals, WORLD)
                        if SENDS:
                            push_until(
                                flag, call + 1, words, peer_data, peer_flags, flags, queues, call, shard_words,
                                part_words, rank, site, stop, patience, signals, WORLD, PARTS, PIECES, BLOCK, KEEP,
                                True,
                            )  # fmt: skip
                        wait_at_least(flag, call + 1, stop, patience, site * WAIT_KINDS + WAIT_PART, source)
                        load_fence()
                    a_desc = gathered_desc
                    if i == 0:
                        a_desc = own_desc
                    for step in tl.range(first * steps, last * steps):
                        ahead = step // steps
                        source = (rank + ahead) % WORLD
                        k = (step - ahead * steps) * BLOCK_K
                        row = m * BLOCK_M + tl.where(ahead > 0, source * rows, 0)
                        if TRANSPOSED:
                            right = b_desc.load([n * BLOCK_N, source * inner + k]).T
                        else:
                            right = b_desc.load([source * inner + k, n * BLOCK_N])
                        total = tl.dot(a_desc.load([row, k]), right, total)
                seen = part
                total *= unless_aborted(1.0, stop)
                if BIAS:
                    at = n * BLOCK_N + tl.arange(0, BLOCK_N)
                    total += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
                following = claim(queues + 1, THREADS)
                store_tile(c_desc, m * BLOCK_M, n * BLOCK_N, total.to(c.dtype.element_ty), HALVES)
                turn = claimed(following)

    if SENDS:
        sending = True
        while sending:
            sending = push_piece(
                words, peer_data, peer_flags, flags, queues, call, shard_words, part_words, rank, site, stop, patience,
                signals, WORLD, PARTS, PIECES, BLOCK, KEEP, True,
            )  # fmt: skip

    last_block_ends(queues, calls, peer_flags, call, rank, stop, WORLD, KEEP)

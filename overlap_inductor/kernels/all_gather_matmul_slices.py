# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``, transport ``sm_push``: ``all_gather(a) @ b`` or ``all_to_all(a) @ b`` for matmuls of one or two
waves. A tile waits for one slice of K after the other.

A shard arrives in slices of its columns. A tile continues with each slice of K as soon as the slice is there, so the
tile's own matmul hides the transfer. Each wait drains the pipeline of loads. With more waves, these waits would cost
more than the slices save.

Each block takes a ticket when it starts. The ``PUSHERS`` blocks with the first tickets store this rank's shard into the
peers' workspace, slice after slice (``push.push_slice``). Then they multiply.

Forward progress. When any other block runs, all pushing blocks run or have ended. While a block pushes, it
waits only for credits. Credits depend only on the previous call. A pushing block begins to multiply when every piece of
its rank's shard has been claimed. So a rank sends its shard whatever its tiles wait for, even with one resident block.
All waits are bounded (``signals``).

Memory ordering, CUDA graphs: as in ``all_gather_matmul``. A slice has a flag of its own, and each wait for a slice is
followed by a ``load_fence``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.all_gather_matmul import _store
from overlap_inductor.kernels.all_gather_matmul import _weight_of
from overlap_inductor.kernels.all_gather_matmul import last_block_ends
from overlap_inductor.kernels.push import push_slice
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PART
from overlap_inductor.kernels.signals import load_fence
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import arriving
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import grouped


@triton.jit(do_not_specialize=["rank", "site", "rows"])
def all_gather_matmul_slices(
    own_desc, a,
    b0_desc, c0_desc, c0, bias0, b1_desc, c1_desc, c1, bias1, b2_desc, c2_desc, c2, bias2, b3_desc, c3_desc, c3, bias3,
    extra0, extra1,
    columns0, columns1, columns2, columns3, gathered_desc, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, inner, row_vectors, part_rows, slice_inner, slice_vectors, signals,
    COUNT: tl.constexpr, WORLD: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, PIECES: tl.constexpr,
    PUSHERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, THREADS: tl.constexpr,
    HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIASES: tl.constexpr, EPILOGUE: tl.constexpr, KEEP: tl.constexpr,
    SCATTERED: tl.constexpr,
):  # fmt: skip
    """Arguments and grid as in ``all_gather_matmul``, except for these.

    Args:
        row_vectors: number of 16-byte words in a row.
        slice_inner: number of columns of a slice, a multiple of ``BLOCK_K``.
        slice_vectors: number of 16-byte words in a row of a slice.
        flags: ``signal_flag(s, part * SLICES + i)`` is the flag of slice ``i`` of part ``part`` from rank ``s``.
        queues: ``QUEUE_WORDS + WORLD * PARTS * SLICES`` words. Word 1 counts claimed tiles of all shards. Word 4 counts
            tickets.
    """
    call = tl.load(calls)
    words = a.to(tl.pointer_type(tl.int32), bitcast=True)
    weights = (
        (b0_desc, c0_desc, c0, bias0, columns0), (b1_desc, c1_desc, c1, bias1, columns1),
        (b2_desc, c2_desc, c2, bias2, columns2), (b3_desc, c3_desc, c3, bias3, columns3),
    )  # fmt: skip
    tiles_n = 0
    for w in tl.static_range(COUNT):
        tiles_n += tl.cdiv(weights[w][4], BLOCK_N)
    tiles_shard = tl.cdiv(rows, BLOCK_M)
    # If program ids decided who pushes, waiting blocks could fill the GPU before a pushing block starts.
    sending = tl.atomic_add(queues + 4, 1, sem="relaxed") < PUSHERS
    while sending:
        # The compiler sees the factor 4 in ``row_vectors * 4`` and ``slice_vectors * 4``. So it knows that no mask
        # ends inside a 16-byte word.
        sending = push_slice(
            words,
            peer_data,
            peer_flags,
            flags,
            queues,
            call,
            rows,
            row_vectors * 4,
            part_rows,
            slice_vectors * 4,
            rank,
            site,
            stop,
            patience,
            signals,
            WORLD,
            PARTS,
            SLICES,
            PIECES,
            ROWS,
            COLUMNS,
            KEEP,
            SCATTERED,
        )

    own = tiles_shard * tiles_n
    turn = claimed(claim(queues + 1, THREADS))
    while turn < own * WORLD:
        shard, m, n = arriving(
            tl.maximum(turn - own, 0), rank, tiles_shard, part_rows // BLOCK_M, tiles_n, WORLD, GROUP_M
        )
        a_desc = gathered_desc
        row = shard * rows + m * BLOCK_M
        if turn < own:
            shard = rank
            m, n = grouped(turn, tiles_shard, tiles_n, GROUP_M)
            a_desc = own_desc
            row = m * BLOCK_M
        index = m // (part_rows // BLOCK_M) * SLICES
        b_desc, c_desc, c, bias, columns, biased, weight, n = _weight_of(weights, n, COUNT, BIASES, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(SLICES):
            if shard != rank:
                wait_at_least(
                    signal_flag(flags, shard, index + i, signals, WORLD),
                    call + 1,
                    stop,
                    patience,
                    site * WAIT_KINDS + WAIT_PART,
                    shard,
                )
                load_fence()
            for k in tl.range(i * slice_inner, tl.minimum((i + 1) * slice_inner, inner), BLOCK_K):
                if TRANSPOSED:
                    total = tl.dot(a_desc.load([row, k]), b_desc.load([n * BLOCK_N, k]).T, total)
                else:
                    total = tl.dot(a_desc.load([row, k]), b_desc.load([k, n * BLOCK_N]), total)
        total *= tl.where(shard != rank, unless_aborted(1.0, stop), 1.0)
        if BIASES > 0:
            at = n * BLOCK_N + tl.arange(0, BLOCK_N)
            total += tl.load(bias + at, mask=at < biased, other=0.0).to(tl.float32)[None, :]
        following = claim(queues + 1, THREADS)
        _store(c_desc, c, total, extra0, extra1, weight, shard, m, n, rows, columns, BLOCK_M, BLOCK_N, HALVES, EPILOGUE)
        turn = claimed(following)

    last_block_ends(queues, calls, peer_flags, call, rank, stop, WORLD, KEEP)

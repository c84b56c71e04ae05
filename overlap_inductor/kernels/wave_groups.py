# SPDX-License-Identifier: Apache-2.0
"""Schedule ``wave_groups`` (FlashOverlap, arXiv 2504.19519). A persistent matmul signals when a group of its rows is
stored. For each group, a kernel waits for this signal, and then an ordinary collective sends the group's rows
(``lowerings.wave_groups.launch``).

A *group* is some neighbouring bands of ``BLOCK_M`` rows of each shard. The matmul computes one group after the other,
and stores the rows of a group contiguously. So a collective reads one contiguous range. The example has a group of 2
bands and a group of 1 band. Line 1 has one shard, as in an all-reduce. Line 2 has two shards, as in a reduce-scatter
of two ranks. ::

    | band 0  band 1 | band 2 |
    | shard 0: bands 0, 1   shard 1: bands 0, 1 | shard 0: band 2   shard 1: band 2 |

Counting. A block counts its tiles of a group in one addition, when its next tile belongs to a later group or no tile is
left. Until then, the block's bulk stores continue while the block multiplies its next tile. The waiting kernel sets the
group's counter back to zero, before the next call begins.

Forward progress. The matmul waits for nothing, so it ends. The waiting kernel is launched after the matmul. So it
cannot hold up the matmul, even if both share a hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``). The waiting kernel
needs room for one warp. It finds room on an SM that the matmul leaves free, or when the matmul's blocks end. Its wait
is bounded (``signals``). A collective waits for peers, whose matmuls also end.

Memory ordering. Tiles are stored by bulk stores and ``store_fence``, or by ordinary stores; then comes ``add_flag``
(barrier, release). The waiting kernel acquires the last addition, and with it all earlier ones: additions to a counter
are one release sequence. The collective's kernel starts when the waiting kernel has ended.

Aborts (``signals``). An ordinary collective sends the group's rows even after an abort. So after an abort, and in all
later calls, the waiting kernel overwrites the group's rows with NaN. The collective's sum carries the NaN to every
rank, even to a rank whose kernels have not seen the abort. A tile that the matmul stores later replaces the NaN, but
this rank's host finds the abort on the board (host memory for reports of faults: ``runtime.board``).

CUDA graphs. Counters and queue are zero between calls, and a group's number of tiles depends only on the shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import FLAG_WORDS
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_TILES
from overlap_inductor.kernels.signals import add_flag
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import store_fence
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import grouped
from overlap_inductor.kernels.tile_order import multiply_tile
from overlap_inductor.kernels.tile_order import store_tile


@triton.jit(do_not_specialize=["groups"])
def matmul_in_groups(
    a_desc, b_desc, c_desc, c, bias, partition, counters, queue,
    rows, columns, inner, shards, groups, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BATCH: tl.constexpr,
    THREADS: tl.constexpr, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """``c = (a @ b + bias) * scale``, with its rows ordered by groups. Grid: any number of blocks. The collectives run
    on the SMs that these blocks leave free.

    Args:
        a_desc: ``[shards * rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``.
        b_desc, bias, TRANSPOSED, BIAS: see ``multiply_tile``.
        c, c_desc: ``[shards * rows, columns]``, fp16 or bf16, blocks ``[BLOCK_M, BLOCK_N]``, or half as wide with
            ``HALVES``.
        partition: int32 ``[groups + 1]``: the first band of each group, then the number of bands of a shard.
        counters: int32, ``FLAG_WORDS`` apart: tiles stored of each group, zero before the call.
        queue: int32 ``[2]``, zero between calls: tiles claimed, blocks that have finished.
        scale: fp32, factor of the product before it is rounded.
        BATCH: see ``kernels``.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_band = shards * tiles_n
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_band
    turn = claimed(claim(queue, THREADS))
    group = 0
    first = 0
    bands = 0
    held = 0
    while turn < tiles:
        for _ in range(BATCH):
            if turn < tiles:
                if held == 0:
                    # The loop finds the group. The group's bands are loaded once, after the loop.
                    group = 0
                    for later in range(1, groups):
                        group += (turn >= tl.load(partition + later) * tiles_band).to(tl.int32)
                    first = tl.load(partition + group)
                    bands = tl.load(partition + group + 1) - first
                band, n = grouped(turn - first * tiles_band, shards * bands, tiles_n, GROUP_M)
                shard = band // bands
                m = first + band % bands
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
                following = claim(queue, THREADS)
                tile = (total * scale).to(c.dtype.element_ty)
                rows_group = tl.minimum((first + bands) * BLOCK_M, rows) - first * BLOCK_M
                row = first * BLOCK_M * shards + shard * rows_group + (m - first) * BLOCK_M
                if (m + 1) * BLOCK_M <= rows:
                    store_tile(c_desc, row, n * BLOCK_N, tile, HALVES)
                else:
                    # The rows after a shard's end belong to the next shard.
                    at_m = tl.arange(0, BLOCK_M)
                    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
                    to = c + (row + at_m)[:, None].to(tl.int64) * columns + at_n[None, :]
                    tl.store(to, tile, mask=(m * BLOCK_M + at_m < rows)[:, None] & (at_n < columns)[None, :])
                held += 1
                turn = claimed(following)
                if turn >= (first + bands) * tiles_band:
                    store_fence()
                    add_flag(counters + group * FLAG_WORDS, held)
                    held = 0

    tl.debug_barrier()
    finished = tl.atomic_add(queue + 1, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        tl.store(queue, 0)
        tl.store(queue + 1, 0)


@triton.jit(do_not_specialize=["group", "tiles", "site", "rank", "first", "elements"])
def wait_for_group(counters, c, stop, patience, group, tiles, site, rank, first, elements, BLOCK: tl.constexpr):
    """Wait until ``tiles`` tiles of a group are stored, and set the group's counter back to zero. After an abort, set
    the group's rows to NaN: ``elements`` elements of ``c`` from ``first`` on. Grid: one block of one warp."""
    counter = counters + group * FLAG_WORDS
    wait_at_least(counter, tiles, stop, patience, site * WAIT_KINDS + WAIT_TILES, rank)
    tl.store(counter, 0)
    begin = tl.cast(first, tl.int64)
    end = begin + tl.where(look(stop) == 0, 0, elements)
    for start in range(begin, end, BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        tl.store(c + at, tl.full((BLOCK,), float("nan"), c.dtype.element_ty), mask=at < end)

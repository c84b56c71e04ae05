# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls of experts in persistent kernels: ``x[rows of expert e] @ w[e]`` for each expert.

The experts' rows lie one after the other, and expert ``e``'s rows end at ``ends[e]``. A tile holds rows of one expert
only. A tile at the end of an expert's rows also multiplies rows behind them, but does not store these. The number of
rows is read on the device, so the grid does not depend on it::

    each block: while it can claim a tile, expert after expert:
        out = x @ w[e]
        GATED: out = silu(x @ w[e]) * (x @ v[e])    # one pass over x for both weights
    the last block to finish sets the queue to 0

With ``GATED``, both products and ``silu`` are rounded to the dtype of ``out`` before the kernel goes on, as separate
ops do.

Weights. Expert ``e``'s weight begins at row ``e * rows`` of a descriptor with two dims. ``TRANSPOSED``: the descriptor
holds the transposed weights, ``[experts * columns, inner]``. A tile may then read the first columns of the next
expert's weight, but does not store what it computes from them. Else the descriptor holds ``[experts * inner,
columns]``, and ``inner`` is a multiple of ``BLOCK_K``, because a tile must not add the next expert's rows.

Claims. A kernel that waits for a peer may hold an SM, so not all blocks start at the same time. The others then claim
the tiles of a late block (``tile_order``).

The kernels communicate with no other rank, and a CUDA graph may hold them. Two kernels with one queue must not run at
the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.tile_order import claim
from overlap_inductor.kernels.tile_order import claimed
from overlap_inductor.kernels.tile_order import grouped


@triton.jit
def _tiles(ends, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """For each expert: its first row, the end of its rows, its rows of tiles, and the rows of tiles up to its last one.
    All are vectors of ``EXPERTS``, a power of two."""
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < experts, other=0)
    first = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.cdiv(end - first, BLOCK_M)
    return first, end, tiles, tl.cumsum(tiles, 0)


@triton.jit
def _tile_of(turn, first, end, tiles, passed, tiles_n, EXPERTS: tl.constexpr, GROUP_M: tl.constexpr):
    """``(expert, first row of the expert, end of its rows, m, n)`` of the tile with turn ``turn``."""
    expert = tl.sum((passed * tiles_n <= turn).to(tl.int32), 0)
    here = tl.arange(0, EXPERTS) == expert
    rows = tl.sum(tl.where(here, tiles, 0), 0)
    before = tl.sum(tl.where(here, passed - tiles, 0), 0) * tiles_n
    m, n = grouped(turn - before, rows, tiles_n, GROUP_M)
    return expert, tl.sum(tl.where(here, first, 0), 0), tl.sum(tl.where(here, end, 0), 0), m, n


@triton.jit
def _weight_tile(desc, expert, k, column, inner, columns, TRANSPOSED: tl.constexpr):
    """``[BLOCK_K, BLOCK_N]`` of an expert's weight."""
    if TRANSPOSED:
        return desc.load([expert * columns + column, k]).T
    else:
        return desc.load([expert * inner + k, column])


@triton.jit
def _store(out_desc, out, tile, row, end, column, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the rows of a tile that lie before ``end``, and the columns before ``columns``."""
    if row + BLOCK_M <= end:
        out_desc.store([row, column], tile)
    else:
        at_m, at_n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        to = out + at_m[:, None].to(tl.int64) * columns + at_n[None, :]
        tl.store(to, tile, mask=(at_m < end)[:, None] & (at_n < columns)[None, :])


@triton.jit
def _last_block_ends(queue):
    """Count the calling block as finished. The last block to finish sets the queue to 0."""
    tl.debug_barrier()
    if tl.atomic_add(queue + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(queue, 0)
        tl.store(queue + 1, 0)


@triton.jit(do_not_specialize=["experts"])
def multiply_experts(
    x_desc, w_desc, v_desc, out_desc, out, ends, queue, experts, inner, columns,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    BATCH: tl.constexpr, THREADS: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """See the module. Grid: any number of blocks, ideally one per SM.

    Args:
        x_desc: ``[rows, inner]``, fp16 or bf16, blocks ``[BLOCK_M, BLOCK_K]``.
        w_desc, v_desc: blocks ``[BLOCK_N, BLOCK_K]`` if ``TRANSPOSED``, else ``[BLOCK_K, BLOCK_N]``. Without ``GATED``,
            ``v_desc`` is ``None``.
        out_desc, out: ``[rows, columns]``, blocks ``[BLOCK_M, BLOCK_N]``.
        ends: int32 ``[experts]``.
        queue: int32 ``[2]``, 0 before and after the kernel: claimed tiles, and finished blocks.
        EXPERTS: a power of two, at least ``experts``.
        BATCH: see ``one_op.descriptors.TILES_A_BATCH``.
    """
    first, end, tiles, passed = _tiles(ends, experts, EXPERTS, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    count = tl.sum(tiles, 0) * tiles_n
    turn = claimed(claim(queue, THREADS))
    while turn < count:
        for _ in range(BATCH):
            if turn < count:
                expert, first_row, end_row, m, n = _tile_of(turn, first, end, tiles, passed, tiles_n, EXPERTS, GROUP_M)
                row, column = first_row + m * BLOCK_M, n * BLOCK_N
                product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                if GATED:
                    value = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for k in tl.range(0, inner, BLOCK_K):
                    x = x_desc.load([row, k])
                    w = _weight_tile(w_desc, expert, k, column, inner, columns, TRANSPOSED)
                    product = tl.dot(x, w, product)
                    if GATED:
                        v = _weight_tile(v_desc, expert, k, column, inner, columns, TRANSPOSED)
                        value = tl.dot(x, v, value)
                following = claim(queue, THREADS)
                tile = product.to(out.dtype.element_ty)
                if GATED:
                    gate = tile.to(tl.float32)
                    gate = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
                    tile = (gate * value.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty)
                _store(out_desc, out, tile, row, end_row, column, columns, BLOCK_M, BLOCK_N)
                turn = claimed(following)
    _last_block_ends(queue)

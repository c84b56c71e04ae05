# SPDX-License-Identifier: Apache-2.0
"""Which tile has which *turn*, how a block claims a turn, and how a tile is multiplied and stored. Turns are numbers
that blocks claim from a queue, one after the other."""

from __future__ import annotations

import triton
import triton.language as tl

CLAIM = tl.constexpr("""
{
.reg .pred other;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.ne.u32 other, thread, 0;
mov.u32 $0, 0;
@!other atom.relaxed.gpu.global.add.s32 $0, [$1], 1;
}
""")


@triton.jit
def _claim(queue, THREADS: tl.constexpr):
    return tl.inline_asm_elementwise(
        CLAIM, "=r,l", [queue + tl.zeros((THREADS,), tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _claimed(claim):
    return tl.sum(claim)


@triton.jit
def _claim_twin(queue, THREADS: tl.constexpr):
    return tl.atomic_add(queue, 1, sem="relaxed")


@triton.jit
def _claimed_twin(claim):
    return claim


if triton.knobs.runtime.interpret:
    claim, claimed = _claim_twin, _claimed_twin
else:
    claim, claimed = _claim, _claimed
"""``claimed(claim(queue, THREADS))``: the next turn of a queue. ``THREADS``: number of threads of the block.

A block claims its next turn when it has multiplied a tile, and reads the answer when it has stored the tile. So the
store hides the microsecond that memory takes to answer. A block that claimed earlier would hold two tiles while free
blocks find none.
"""


@triton.jit
def grouped(turn, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile ``(m, n)`` of turn ``turn`` in a matrix of tiles. ``GROUP_M`` rows of tiles are taken together, tile column
    by tile column, so that neighbouring turns share operands in L2."""
    in_group = GROUP_M * tiles_n
    first = (turn // in_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    rest = turn % in_group
    return first + rest % rows, rest // rows


@triton.jit
def band_tiles(band, tiles_shard, tiles_part, tiles_n):
    """Number of tiles in a band of a shard. The shard has ``tiles_shard`` rows of ``tiles_n`` tiles. A band has
    ``tiles_part`` rows of tiles; the last band may have fewer."""
    return tl.maximum(tl.minimum(tiles_shard - band * tiles_part, tiles_part), 0) * tiles_n


@triton.jit
def own_tile(turn, tiles_shard, tiles_part, tiles_n, GROUP_M: tl.constexpr):
    """``(m, n)`` of turn ``turn`` among the tiles of this rank's own shard, band after band."""
    band = turn // (tiles_part * tiles_n)
    m, n = grouped(
        turn - band * tiles_part * tiles_n, tl.minimum(tiles_shard - band * tiles_part, tiles_part), tiles_n, GROUP_M
    )
    return band * tiles_part + m, n


@triton.jit
def arriving(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    """``(shard, m, n)`` of turn ``turn`` among the tiles of the peers' shards, in the order in which their rows arrive.
    Part 0 of shards ``rank + 1``, ``rank + 2``, ... comes first, then part 1 of these shards, and so on.

    A shard has ``tiles_shard`` rows of tiles. A part has ``tiles_part`` of them; the last part may have fewer. ``m``
    counts inside the shard.
    """
    whole = tiles_part * tiles_n * (WORLD - 1)
    part = turn // whole
    rows = tl.minimum(tiles_shard - part * tiles_part, tiles_part)
    rest = turn - part * whole
    step = rest // (rows * tiles_n)
    m, n = grouped(rest % (rows * tiles_n), rows, tiles_n, GROUP_M)
    return (rank + 1 + step) % WORLD, part * tiles_part + m, n


@triton.jit
def departing(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    """As ``arriving``, for tiles that are sent. At any time, about equally many tiles are in transfer to each rank. In
    the order of ``arriving``, two ranks could share one receiver's link for a whole part.

    In a part, about ``GROUP_M`` rows of tiles are taken together, tile column by tile column. In a column, neighbouring
    turns belong to different shards.
    """
    GROUP: tl.constexpr = GROUP_M // (WORLD - 1) if GROUP_M >= WORLD else 1
    whole = tiles_part * tiles_n * (WORLD - 1)
    part = turn // whole
    rest = turn - part * whole
    in_group = GROUP * tiles_n * (WORLD - 1)
    first = rest // in_group * GROUP
    rows = tl.minimum(tl.minimum(tiles_shard - part * tiles_part, tiles_part) - first, GROUP)
    rest = rest % in_group
    n = rest // (rows * (WORLD - 1))
    rest = rest % (rows * (WORLD - 1))
    return (rank + 1 + rest % (WORLD - 1)) % WORLD, part * tiles_part + first + rest // (WORLD - 1), n


@triton.jit
def store_tile(desc, row, column, tile, HALVES: tl.constexpr):
    """Start the bulk store of a tile. With ``HALVES``, the tile is stored in two halves of its columns, which takes
    half the shared memory. The blocks of ``desc`` are then half a tile wide."""
    if HALVES:
        BLOCK_M: tl.constexpr = tile.shape[0]
        HALF: tl.constexpr = tile.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        desc.store([row, column], left)
        desc.store([row, column + HALF], right)
    else:
        desc.store([row, column], tile)


@triton.jit
def multiply_tile(
    a_desc,
    b_desc,
    bias,
    row,
    column,
    inner,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """``a[row : row + BLOCK_M, :inner] @ b[:inner, column : column + BLOCK_N]`` in fp32, plus ``bias`` ``[columns]`` if
    ``BIAS``.

    ``a_desc``: blocks ``[BLOCK_M, BLOCK_K]``. ``b_desc``: blocks ``[BLOCK_K, BLOCK_N]`` of the right operand. With
    ``TRANSPOSED``: blocks ``[BLOCK_N, BLOCK_K]`` of the transposed right operand.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, inner, BLOCK_K):
        if TRANSPOSED:
            total = tl.dot(a_desc.load([row, k]), b_desc.load([column, k]).T, total)
        else:
            total = tl.dot(a_desc.load([row, k]), b_desc.load([k, column]), total)
    if BIAS:
        at = column + tl.arange(0, BLOCK_N)
        total += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
    return total

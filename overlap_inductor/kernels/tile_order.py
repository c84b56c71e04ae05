"""Which tile comes at which turn."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped(turn, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile ``(m, n)`` of turn ``turn`` in a matrix of tiles: columns of ``GROUP_M`` rows one after the other, so that neighbours share operands in L2."""
    in_group = GROUP_M * tiles_n
    first = (turn // in_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    rest = turn % in_group
    return first + rest % rows, rest // rows


@triton.jit
def arriving(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    """``(shard, m, n)`` of turn ``turn`` among the tiles of the other ranks' shards, in the order in which their rows come.

    All ranks send at once, part after part: so part 0 of shard ``rank + 1``, ``rank + 2``, ..., then part 1, .... ``tiles_shard`` rows of tiles a
    shard, ``tiles_part`` a part (the last part may have fewer); ``m`` counts inside the shard.
    """
    whole = tiles_part * tiles_n * (WORLD - 1)
    part = turn // whole
    rows = tl.minimum(tiles_shard - part * tiles_part, tiles_part)
    rest = turn - part * whole
    step = rest // (rows * tiles_n)
    m, n = grouped(rest % (rows * tiles_n), rows, tiles_n, GROUP_M)
    return (rank + 1 + step) % WORLD, part * tiles_part + m, n

# SPDX-License-Identifier: Apache-2.0
"""The order in which the kernels of reductions claim tiles. Each tile is claimed once.

- Reduce-scatter: the peers' tiles come before this rank's own tiles.
- All-reduce: one band after the other, and in each band the peers' tiles first.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_inductor.kernels import matmul_all_reduce
from overlap_inductor.kernels import matmul_reduce_scatter

in_bands, own_last = matmul_all_reduce._tile, matmul_reduce_scatter._tile

RANK = 1
SIZES = [(1, 1, 2), (5, 2, 3), (5, 3, 2), (4, 2, 3), (3, 1, 4)]
"""``(rows of tiles in a shard, rows of tiles in a band, ranks)``."""
TILES_N, GROUP_M = 3, 2


@triton.jit
def _all_turns(
    out, count, rank, tiles_shard, tiles_part, tiles_n, BANDS: tl.constexpr, WORLD: tl.constexpr, GROUP_M: tl.constexpr
):
    for turn in range(count):
        if BANDS:
            shard, m, n = in_bands(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
        else:
            shard, m, n = own_last(turn, rank, tiles_shard, tiles_part, tiles_n, WORLD, GROUP_M)
        tl.store(out + turn * 3, shard)
        tl.store(out + turn * 3 + 1, m)
        tl.store(out + turn * 3 + 2, n)


def _turns(tiles_shard: int, tiles_part: int, world_size: int, bands: bool) -> list[tuple[int, ...]]:
    shard = tiles_shard * TILES_N
    out = torch.full((shard * world_size, 3), -1, dtype=torch.int32)
    _all_turns[(1,)](out, len(out), RANK, tiles_shard, tiles_part, TILES_N, bands, world_size, GROUP_M)
    turns = [tuple(t) for t in out.tolist()]
    assert sorted(turns) == [(s, m, n) for s in range(world_size) for m in range(tiles_shard) for n in range(TILES_N)]
    return turns


@pytest.mark.parametrize(("tiles_shard", "tiles_part", "world_size"), SIZES)
def test_a_scatter_multiplies_every_tile_once_and_its_own_last(
    tiles_shard: int, tiles_part: int, world_size: int
) -> None:
    turns = _turns(tiles_shard, tiles_part, world_size, bands=False)
    assert [s == RANK for s, _, _ in turns] == sorted(s == RANK for s, _, _ in turns)
    for mine in (False, True):
        bands = [m // tiles_part for s, m, _ in turns if (s == RANK) == mine]
        assert bands == sorted(bands)


@pytest.mark.parametrize(("tiles_shard", "tiles_part", "world_size"), SIZES)
def test_an_all_reduce_multiplies_every_tile_once_band_after_band(
    tiles_shard: int, tiles_part: int, world_size: int
) -> None:
    order = [(m // tiles_part, s == RANK) for s, m, _ in _turns(tiles_shard, tiles_part, world_size, bands=True)]
    assert order == sorted(order)


@pytest.mark.parametrize(("tiles_shard", "tiles_part", "world_size"), SIZES)
def test_a_scatter_sends_to_all_peers_evenly(tiles_shard: int, tiles_part: int, world_size: int) -> None:
    """At every point of the order, the numbers of tiles claimed for any two peers differ by at most one."""
    peers = [s for s, _, _ in _turns(tiles_shard, tiles_part, world_size, bands=False) if s != RANK]
    for end in range(len(peers)):
        counts = [peers[:end].count(s) for s in range(world_size) if s != RANK]
        assert max(counts) - min(counts) <= 1

"""The order in which tiles are claimed: every tile once, and nothing before what it waits for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_inductor.kernels.matmul_reduce import _turn

PEERS, OWN, COPY = range(3)


@triton.jit
def _all_turns(out, count, tiles_shard, tiles_part, tiles_n, WORLD: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr, COPY_LAG: tl.constexpr, STEPS: tl.constexpr):
    for turn in range(count):
        kind, inner = _turn(turn, tiles_shard, tiles_part, tiles_n, WORLD, PARTS, LAG, COPY_LAG, STEPS)
        tl.store(out + turn * 2, kind)
        tl.store(out + turn * 2 + 1, inner)


@pytest.mark.parametrize(
    ("tiles_shard", "tiles_part", "world_size", "lag", "copy_lag", "steps"),
    [(1, 1, 2, 1, 1, 3), (5, 2, 3, 2, 1, 3), (5, 3, 2, 1, 2, 3), (4, 2, 3, 1, 1, 2)],
)
def test_every_tile_once_and_behind_what_it_waits_for(tiles_shard: int, tiles_part: int, world_size: int, lag: int, copy_lag: int, steps: int) -> None:
    tiles_n, parts = 2, -(-tiles_shard // tiles_part)
    sources = {PEERS: world_size - 1, OWN: 1, **({COPY: world_size - 1} if steps == 3 else {})}
    count = tiles_shard * tiles_n * sum(sources.values())
    out = torch.full((count, 2), -1, dtype=torch.int32)
    _all_turns[(1,)](out, count, tiles_shard, tiles_part, tiles_n, world_size, parts, min(lag, parts), copy_lag, steps)
    turns = [tuple(t) for t in out.tolist()]
    assert sorted(turns) == sorted((kind, i) for kind, n in sources.items() for i in range(tiles_shard * tiles_n * n))

    def band(kind: int, inner: int) -> int:
        return inner // (tiles_part * tiles_n * sources[kind])

    where = {(kind, b): [i for i, t in enumerate(turns) if t[0] == kind and band(*t) == b] for kind in sources for b in range(parts)}
    for kind, before in ((OWN, PEERS), (COPY, OWN)):
        for b in range(parts) if kind in sources else ():
            assert min(where[kind, b]) > max(where[before, b]), (kind, b)

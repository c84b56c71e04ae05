"""What is planned of a fused kernel before any GPU is touched: its parameters, what it is not made for, what workspace
it needs. No Triton here."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import KW_ONLY
from dataclasses import dataclass
from typing import Any

import torch

from overlap_inductor.lowerings.one_op.operands import lies_transposed
from overlap_inductor.lowerings.one_op.operands import why_not as why_not

NEVER = 2**62
COPIES_FROM = 4 << 20
"""Bytes of a shard from which on copy engines are the faster: seen on 2 H200s, also as one of 4 and of 8 ranks
(bench/results/mirrored.jsonl)."""


@dataclass(frozen=True, eq=False)
class FusedParameters:
    """What may be tuned. (Compared by identity: ``parameters_of`` makes one for each text, and it is part of a key that
    is looked up at every call.)

    Attributes:
        blocks: grid, at best the number of SMs.
        copies_from: bytes of an all-gather's shard from which copy engines send it, not SMs.
        parts: bands a shard, from ``parts_from`` rows of the whole matmul on; below one. 0: as many as ranks.
        pieces: in which a band is pushed (all-gather).
        pushers: blocks that push: before they multiply (all-gather); whenever something is ready (all-reduce; 0: by
            ``push_inner``).
        push_inner: K for which one block pushes as fast as all multiply (all-reduce). The best of those tried were 4 to
            8 blocks for K = 14336, 10 to 12 for 7168 and 20 to 24 for 3584 (2 and 4 H200s, one of 8).
        unit: tiles beside each other that are pushed at once (all-reduce).
        slices, slices_tiles, slices_pushers: slices along K in which a shard is pushed, by so many blocks, and a tile
            waits for it (all-gather), up to so many tiles; fewer of more tiles (``slices_of``). Numbers of the plan,
            not of the GPU: all ranks must cut alike.
        column_tiles: tiles in a row of all weights of a gather. Ranks may have more or less columns, and count them
            alike here; 0: as the weights have.
        stagger_ns: between the starts of neighbouring blocks (reduce-scatter).
        halves: tiles are stored in two halves, which leaves shared memory for one stage more.
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
        replays: a call that comes again is one launch of a CUDA graph (``runtime.replay``).
    """

    blocks: int
    _: KW_ONLY
    copies_from: int = NEVER
    parts: int = 1
    parts_from: int = 0
    pieces: int = 16
    pushers: int = 8
    push_inner: int = 80_000
    unit: int = 4
    slices: int = 1
    slices_tiles: int = 0
    slices_pushers: int = 16
    column_tiles: int = 0
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    stagger_ns: int = 0
    halves: bool = False
    min_rows: int = 0
    replays: bool = True

    def __post_init__(self) -> None:
        least = {"parts": 0, "pushers": 0, "push_inner": 1, "unit": 1}
        wrong = [
            f"{name}={getattr(self, name)} (at least {limit})"
            for name, limit in least.items()
            if getattr(self, name) < limit
        ]
        if wrong:
            raise ValueError(f"parameters of schedule fused: {', '.join(wrong)}")


TUNED: Mapping[str, Mapping[str, Any]] = {
    "all_gather_matmul": {
        "parts": 4,
        "parts_from": 4096,
        "pushers": 12,
        "slices": 4,
        "slices_tiles": 132,
        "stages": 4,
        "halves": True,
    },
    "matmul_reduce_scatter": {"stagger_ns": 150, "stages": 4, "halves": True},
    "matmul_all_reduce": {"parts": 0, "pushers": 0, "stages": 4, "halves": True},
}
"""The best of what was tried on 2 and 4 H200s (bench/results/fused.jsonl, operators.jsonl), and as one of 4 and of 8
ranks on 2 (bench/results/mirrored.jsonl), by pattern."""


MOST_WEIGHTS = 4
"""Weights that one launch multiplies a gathered tensor by: q, k, v and a gate; further ones are the vendor's matmuls.
"""


def transports_of(pattern: str) -> tuple[str, ...]:
    """What may move a pattern's bytes. Tiles leave from the matmul's epilogue, or from blocks beside it: an SM stores
    them."""
    return ("sm_push", "copy_engine") if pattern == "all_gather_matmul" else ("sm_push",)


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    """The tuned parameters of a pattern, for the plan; ``transport`` as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
    copies = {"auto": {"copies_from": COPIES_FROM}, "copy_engine": {"copies_from": 0}}.get(transport, {})
    return {**TUNED[pattern], **(copies if pattern == "all_gather_matmul" else {})}


@functools.cache
def parameters_of(settings: str, blocks: int) -> FusedParameters:
    """The parameters that a plan's ``settings`` (JSON text) and the device's number of SMs make."""
    return FusedParameters(blocks, **json.loads(settings))


def slices_of(world_size: int, shard: torch.Tensor, rhs: Sequence[torch.Tensor], parameters: FusedParameters) -> int:
    """Slices along K of a gather of ``shard [rows, K]`` multiplied by each of ``rhs [K, N]``; 1: none.

    As many as planned where all tiles are on the SMs at once, fewer of more tiles: tiles of shards that are there are
    then multiplied meanwhile. None of shards that copy engines send.
    """
    if shard.nbytes > parameters.copies_from:
        return 1
    across = parameters.column_tiles or column_tiles([b.shape[1] for b in rhs], parameters)
    tiles = world_size * -(-shard.shape[0] // parameters.block_m) * across
    return max(1, parameters.slices * parameters.slices_tiles // max(parameters.slices_tiles, tiles, 1))


def column_tiles(columns: Sequence[int], parameters: FusedParameters) -> int:
    """Tiles in a row of weights of ``columns``."""
    return sum(-(-n // parameters.block_n) for n in columns)


def band_rows(rows: int, world_size: int, parameters: FusedParameters) -> int:
    """Rows of a band of a shard of ``rows``: a multiple of the tile, so that no tile waits for two bands."""
    tiles = -(-rows // parameters.block_m)
    parts = (parameters.parts or world_size) if world_size * rows >= parameters.parts_from else 1
    return -(-tiles // min(parts, tiles)) * parameters.block_m


def pushers_of(inner: int, parameters: FusedParameters) -> int:
    """Blocks of an all-reduce of operands of ``inner`` K that push: so many that they are as fast as the others
    multiply, which takes a tile as long as its K."""
    return parameters.pushers or min(max(1, round(parameters.push_inner / inner)), parameters.blocks // 2 or 1)


def needed(
    pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: FusedParameters
) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs of its slot: ``rows`` of a shard, ``inner`` its K, ``columns`` its N."""
    # (The most of any fewer rows, too: what is planned for the largest count must serve all.)
    parts = min(parameters.parts or world_size, -(-rows // parameters.block_m))
    if pattern == "all_gather_matmul":
        return world_size * rows * inner * itemsize, parts * parameters.slices
    whole_rows = world_size * -(-rows // parameters.block_m) * parameters.block_m
    legs = 2 if pattern == "matmul_all_reduce" else 1
    return legs * whole_rows * columns * itemsize, legs * parts


def in_one_launch(rhs: Sequence[torch.Tensor]) -> list[int]:
    """Which weights of a gathered tensor its kernel multiplies by: the widest of those that lie alike, of the layout
    that has most columns.

    Weights in rows and transposed ones need tensor maps of different blocks, and one loop over K has one kind.
    """
    alike: dict[bool, list[int]] = {}
    for i, b in enumerate(rhs):
        alike.setdefault(lies_transposed(b), []).append(i)
    widest = [sorted(members, key=lambda i: -rhs[i].shape[1])[:MOST_WEIGHTS] for members in alike.values()]
    return sorted(max(widest, key=lambda members: sum(rhs[i].shape[1] for i in members)))

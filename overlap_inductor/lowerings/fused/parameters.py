# SPDX-License-Identifier: Apache-2.0
"""Parameters (``one_op.schedule.OpPlan``), limits and workspace of schedule ``fused``. This module does not import
Triton."""

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
from overlap_inductor.transports import sm_push
from overlap_inductor.transports.registry import of_kind
from overlap_inductor.transports.transport import PeerCopies

NEVER = 2**62
COPIES_FROM = 4 << 20
"""Copy engines send a shard of at least this many bytes faster than SMs do. Measured on 2 H200s
(bench/results/mirrored.jsonl)."""


@dataclass(frozen=True, eq=False)
class FusedParameters:
    """The tunable parameters. They are part of a key that is looked up at every call. So they are compared by identity,
    which takes less time than to compare fields. ``parameters_of`` makes one object for equal parameters.

    Attributes:
        blocks: number of blocks of the grid, ideally the number of SMs.
        copies_from: a transport of ``copiers`` sends a shard of at least this many bytes, and SMs send a smaller one
            (patterns of ``GATHERS``).
        copier: name of that transport; empty for the first of ``copiers``.
        parts: largest number of bands of a shard. 0: the number of ranks.
        parts_from: if the whole matmul has fewer rows, a shard is one band.
        pieces: number of pieces in which a band is pushed (patterns of ``GATHERS``).
        pushers: number of blocks that push. 0 (all-reduce): ``push_inner`` decides.
        push_inner: K for which one block pushes as fast as all others multiply (all-reduce).
        unit: number of neighbouring tiles that are pushed at once (all-reduce).
        slices: number of slices along K in which a shard is pushed (patterns of ``GATHERS``). A tile waits for the
            slices one by one.
        slices_tiles: with more tiles than this, a shard has fewer slices (``slices_of``). All ranks need the same
            number of slices, so this limit is in the plan.
        slices_pushers: number of blocks that push the slices.
        column_tiles: tiles across the columns of all weights of a gather, equal on all ranks. 0: those of this rank's
            weights.
        stagger_ns: nanoseconds between the starts of neighbouring blocks (reduce-scatter, all-to-all after a matmul).
        early: number of received pieces that a block may copy to the result after each tile of the rank's own slice
            (all-to-all after a matmul). A piece is as large as a tile. -1: one for each peer.
        halves: store tiles in two halves, which leaves shared memory for one more stage.
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
        replays: a repeated call is replayed as one CUDA graph (``runtime.replay``).

    Raises:
        ValueError: ``parts``, ``pushers``, ``push_inner`` or ``unit`` is too small.
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
    early: int = -1
    halves: bool = False
    copier: str = ""
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


_GATHER: Mapping[str, Any] = {
    "parts": 4,
    "parts_from": 4096,
    "pushers": 12,
    "slices": 4,
    "slices_tiles": 132,
    "stages": 4,
    "halves": True,
}
TUNED: Mapping[str, Mapping[str, Any]] = {
    "all_gather_matmul": _GATHER,
    "all_to_all_matmul": _GATHER,
    "matmul_reduce_scatter": {"stagger_ns": 150, "stages": 4, "halves": True},
    "matmul_all_to_all": {"stagger_ns": 150, "stages": 4, "halves": True},
    "matmul_all_reduce": {"parts": 0, "pushers": 0, "stages": 4, "halves": True},
}
"""By pattern, the best of the values tried on 2 and 4 H200s (bench/results/fused.jsonl, operators.jsonl,
mirrored.jsonl). All-to-alls share a kernel with the gather or the reduce-scatter, and so have its values."""
EXCHANGES = ("matmul_all_to_all", "all_to_all_matmul")
GATHERS = ("all_gather_matmul", "all_to_all_matmul")
"""The patterns whose rows are multiplied after they have arrived."""


CONTRACTED = 64
"""If a matmul contracts the exchanged dim, each rank's slice of this dim must be a multiple of this many elements
(``block_k``). So each block of K comes from one rank."""
MOST_WEIGHTS = 4
"""Largest number of weights in one launch of a gather: q, k, v and a gate."""


def copiers() -> list[PeerCopies]:
    """The transports that may send the shard of a gather. They must not need an SM, because the kernel occupies all
    SMs."""
    return [t for t in of_kind(PeerCopies) if not t.needs_sms]


def transports_of(pattern: str) -> tuple[str, ...]:
    return (sm_push.NAME, *(t.name for t in copiers() if pattern in GATHERS))


def automatic(pattern: str) -> tuple[str, ...]:
    return transports_of(pattern)[:2]


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    if pattern not in GATHERS or transport == sm_push.NAME:
        return {**TUNED[pattern]}
    if transport == "auto":
        return {**TUNED[pattern], "copies_from": COPIES_FROM}
    copier = {} if transport == copiers()[0].name else {"copier": transport}
    return {**TUNED[pattern], "copies_from": 0, **copier}


@functools.cache
def parameters_of(settings: str, blocks: int) -> FusedParameters:
    return FusedParameters(blocks, **json.loads(settings))


def slices_of(world_size: int, shard: torch.Tensor, rhs: Sequence[torch.Tensor], parameters: FusedParameters) -> int:
    """The number of slices along K in which ``shard [rows, K]`` is pushed. ``rhs``: the gather's weights ``[K, N]``.

    If there are more than ``slices_tiles`` tiles, fewer slices suffice: while a shard is on its way, the SMs can
    multiply tiles of the shards that have arrived. A shard that ``copiers`` send is not sliced.
    """
    if shard.nbytes >= parameters.copies_from:
        return 1
    across = parameters.column_tiles or column_tiles([b.shape[1] for b in rhs], parameters)
    tiles = world_size * -(-shard.shape[0] // parameters.block_m) * across
    return max(1, parameters.slices * parameters.slices_tiles // max(parameters.slices_tiles, tiles, 1))


def column_tiles(columns: Sequence[int], parameters: FusedParameters) -> int:
    """Tiles across all weights."""
    return sum(-(-n // parameters.block_n) for n in columns)


def band_rows(rows: int, world_size: int, parameters: FusedParameters) -> int:
    """Rows of a band: a multiple of ``block_m``, so that no tile waits for two bands. ``rows``: rows of a shard."""
    tiles = -(-rows // parameters.block_m)
    parts = (parameters.parts or world_size) if world_size * rows >= parameters.parts_from else 1
    return -(-tiles // min(parts, tiles)) * parameters.block_m


def pushers_of(inner: int, parameters: FusedParameters) -> int:
    """The number of blocks that push in an all-reduce with K ``inner``. They should push as fast as the others
    multiply. A tile's matmul takes a time proportional to K, so fewer blocks push if K is larger."""
    return parameters.pushers or min(max(1, round(parameters.push_inner / inner)), parameters.blocks // 2 or 1)


def needed(
    pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: FusedParameters
) -> tuple[int, int]:
    """``(bytes, signals)`` of a call's slot (its part of the workspace). ``rows``: rows of a shard; ``inner``,
    ``columns``: K and N; ``itemsize``: bytes of a sent element."""
    # What is enough for ``rows`` rows is also enough for a call with fewer rows.
    parts = min(parameters.parts or world_size, -(-rows // parameters.block_m))
    if pattern in EXCHANGES:
        # If slices of K or of columns are exchanged, a shard may have more rows than ``rows``. So count the most parts
        # that a shard of any size can have.
        parts = parameters.parts or world_size
    if pattern in GATHERS:
        return world_size * rows * inner * itemsize, parts * parameters.slices
    whole_rows = world_size * -(-rows // parameters.block_m) * parameters.block_m
    legs = 2 if pattern == "matmul_all_reduce" else 1
    return legs * whole_rows * columns * itemsize, legs * parts


def in_one_launch(rhs: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the weights that one kernel multiplies a gathered tensor by: the ``MOST_WEIGHTS`` widest weights of
    one layout (row-major or transposed). The layout is the one whose widest weights have more columns in total. A loop
    over K reads weights of one layout only, because tensor maps of the other layout have another block shape."""
    alike: dict[bool, list[int]] = {}
    for i, b in enumerate(rhs):
        alike.setdefault(lies_transposed(b), []).append(i)
    widest = [sorted(members, key=lambda i: -rhs[i].shape[1])[:MOST_WEIGHTS] for members in alike.values()]
    return sorted(max(widest, key=lambda members: sum(rhs[i].shape[1] for i in members)))

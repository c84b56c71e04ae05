# SPDX-License-Identifier: Apache-2.0
"""The parts of schedule ``fused`` that need no GPU: its parameters, its limits, and the workspace that a call needs.
This module does not import Triton."""

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
"""Copy engines send a shard of at least this many bytes faster than the kernel's SMs do. Measured on 2 H200s, also with
each in the place of one rank of 4 or of 8 (``bench.mirrored``, bench/results/mirrored.jsonl)."""


@dataclass(frozen=True, eq=False)
class FusedParameters:
    """The tunable parameters. Objects of this class are compared by identity, because such an object is part of a key
    that is looked up at every call. ``parameters_of`` makes only one object for the same text and number of blocks.

    Attributes:
        blocks: number of blocks of the grid, ideally the number of SMs.
        copies_from: a shard of at least this many bytes is sent by a transport of ``copiers``, not by the kernel's SMs
            (patterns in ``GATHERS``).
        copier: name of that transport; empty for the first of ``copiers``.
        parts: largest number of bands of a shard if the whole matmul has at least ``parts_from`` rows. Otherwise a
            shard is one band. 0: at most as many bands as ranks.
        pieces: number of pieces in which a band is pushed (all-gather).
        pushers: number of blocks that push. In an all-gather they push before they multiply, in an all-reduce whenever
            something is ready. 0 (all-reduce): ``push_inner`` decides.
        push_inner: K for which one block pushes as fast as all others multiply (all-reduce). The best numbers of
            pushing blocks were 4 to 8 for K = 14336, 10 to 12 for 7168 and 20 to 24 for 3584. (Tried on 2 and 4 H200s,
            and on 2 H200s that each took the place of one rank of 8.)
        unit: number of neighbouring tiles that are pushed at once (all-reduce).
        slices: number of slices along K in which a shard is pushed (all-gather). A tile waits for them one by one.
        slices_tiles: largest number of tiles for which a shard is cut into ``slices``; with more tiles it is cut into
            fewer (``slices_of``). This number is in the plan and is not read from the GPU, because all ranks must cut
            their shards into the same number of slices.
        slices_pushers: number of blocks that push the slices.
        column_tiles: number of tiles across the columns of all weights of a gather. Ranks may have different numbers of
            columns, but must use the same number here. 0: count the tiles of this rank's weights.
        stagger_ns: nanoseconds between the starts of neighbouring blocks (reduce-scatter, all-to-all after a matmul).
        early: largest number of arrived pieces that a block copies after each tile of the rank's own slice (all-to-all
            after a matmul). A piece has the size of a tile. -1: one for each peer. The copies then end about when the
            tiles of the own slice end.
        halves: whether tiles are stored in two halves, which leaves shared memory for one more stage.
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
        replays: whether a repeated call is replayed as one CUDA graph (``runtime.replay``).

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
"""By pattern, the best of the values tried on 2 and 4 H200s (bench/results/fused.jsonl, operators.jsonl). They were
also tried on 2 H200s that each took the place of one rank of 4 or of 8 (bench/results/mirrored.jsonl). The all-to-alls
share the kernels of the gather and of the reduce-scatter, and have the values of these two patterns. No other values
were tried for the all-to-alls."""
EXCHANGES = ("matmul_all_to_all", "all_to_all_matmul")
GATHERS = ("all_gather_matmul", "all_to_all_matmul")
"""The patterns whose rows are multiplied after they have arrived."""


CONTRACTED = 64
"""A slice of a contracted dim must be a multiple of this many elements (``block_k``). Then each block of K lies in
the slice of one source rank."""
MOST_WEIGHTS = 4
"""Largest number of weights by which one launch multiplies a gathered tensor: q, k, v and a gate. The vendor's matmul
takes any further weights."""


def copiers() -> list[PeerCopies]:
    """The transports that may send the shard of a gather. They must not need an SM, because the kernel occupies all SMs
    while it waits for what they send."""
    return [t for t in of_kind(PeerCopies) if not t.needs_sms]


def transports_of(pattern: str) -> tuple[str, ...]:
    """The transports that a user may choose for ``pattern``. The kernel's own SMs store the tiles of a reduction,
    either in the matmul's epilogue or in blocks that run next to the matmul's blocks. For ``GATHERS``, the SMs or one
    of ``copiers`` may send the shard."""
    return (sm_push.NAME, *(t.name for t in copiers() if pattern in GATHERS))


def automatic(pattern: str) -> tuple[str, ...]:
    """The transports that ``auto`` chooses from: the first of ``copiers`` sends a gather's shard from ``COPIES_FROM``
    bytes on (``FusedParameters.copies_from``)."""
    return transports_of(pattern)[:2]


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    """The tuned parameters of a pattern, for the plan; ``transport`` as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
    if pattern not in GATHERS or transport == sm_push.NAME:
        return {**TUNED[pattern]}
    if transport == "auto":
        return {**TUNED[pattern], "copies_from": COPIES_FROM}
    copier = {} if transport == copiers()[0].name else {"copier": transport}
    return {**TUNED[pattern], "copies_from": 0, **copier}


@functools.cache
def parameters_of(settings: str, blocks: int) -> FusedParameters:
    """The parameters of a plan's ``settings`` (JSON text) on a device of ``blocks`` SMs."""
    return FusedParameters(blocks, **json.loads(settings))


def slices_of(world_size: int, shard: torch.Tensor, rhs: Sequence[torch.Tensor], parameters: FusedParameters) -> int:
    """Slices along K of a gather of ``shard [rows, K]`` multiplied by each of ``rhs [K, N]``; 1 if the shard is not
    sliced.

    With at most ``slices_tiles`` tiles, which all run at once, there are as many slices as planned. With more tiles
    there are fewer slices: the SMs then have tiles of arrived shards to multiply while other shards are in transfer. A
    shard that a transport of ``copiers`` sends is not sliced.
    """
    if shard.nbytes >= parameters.copies_from:
        return 1
    across = parameters.column_tiles or column_tiles([b.shape[1] for b in rhs], parameters)
    tiles = world_size * -(-shard.shape[0] // parameters.block_m) * across
    return max(1, parameters.slices * parameters.slices_tiles // max(parameters.slices_tiles, tiles, 1))


def column_tiles(columns: Sequence[int], parameters: FusedParameters) -> int:
    """Number of tiles across all weights. ``columns``: the number of columns of each weight."""
    return sum(-(-n // parameters.block_n) for n in columns)


def band_rows(rows: int, world_size: int, parameters: FusedParameters) -> int:
    """Rows of a band of a shard of ``rows`` rows: a multiple of ``block_m``, so that no tile waits for two bands."""
    tiles = -(-rows // parameters.block_m)
    parts = (parameters.parts or world_size) if world_size * rows >= parameters.parts_from else 1
    return -(-tiles // min(parts, tiles)) * parameters.block_m


def pushers_of(inner: int, parameters: FusedParameters) -> int:
    """Number of blocks that push in an all-reduce with K ``inner``, chosen so that these blocks push as fast as the
    other blocks multiply. The time of a tile's matmul is proportional to K."""
    return parameters.pushers or min(max(1, round(parameters.push_inner / inner)), parameters.blocks // 2 or 1)


def needed(
    pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: FusedParameters
) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs in its slot. ``rows``: rows of a shard; ``inner``, ``columns``: K and N;
    ``itemsize``: bytes of an element that is sent."""
    # (A call with fewer rows never needs more. So what the call with the most rows needs is enough for all calls.)
    parts = min(parameters.parts or world_size, -(-rows // parameters.block_m))
    if pattern in EXCHANGES:
        # (If an all-to-all exchanges slices of K or of columns, the caller may still divide the matmul's rows by the
        # ranks. ``rows`` is then too small to tell the number of parts, so the largest number is used.)
        parts = parameters.parts or world_size
    if pattern in GATHERS:
        return world_size * rows * inner * itemsize, parts * parameters.slices
    whole_rows = world_size * -(-rows // parameters.block_m) * parameters.block_m
    legs = 2 if pattern == "matmul_all_reduce" else 1
    return legs * whole_rows * columns * itemsize, legs * parts


def in_one_launch(rhs: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the weights of a gathered tensor that one kernel multiplies by: the ``MOST_WEIGHTS`` widest weights of
    one layout. Of the two layouts it is the one whose chosen weights have more columns in total.

    Row-major and transposed weights need tensor maps with different block shapes, and one loop over K reads only one
    kind.
    """
    alike: dict[bool, list[int]] = {}
    for i, b in enumerate(rhs):
        alike.setdefault(lies_transposed(b), []).append(i)
    widest = [sorted(members, key=lambda i: -rhs[i].shape[1])[:MOST_WEIGHTS] for members in alike.values()]
    return sorted(max(widest, key=lambda members: sum(rhs[i].shape[1] for i in members)))

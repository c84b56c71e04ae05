"""What is planned of a small-message kernel before any GPU is touched: its parameters, what it is not made for, what
workspace it needs. No Triton here."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from overlap_inductor.runtime.arena import HALVES

LEG_BYTES = 650_000
"""What a GPU sends to its peers in the time that a second leg takes, beyond its bytes: some 2 us (4 and 8 H200s,
bench/results/small_message.jsonl)."""
LIMIT_BYTES = 8 << 20
"""The largest all-reduce: beyond it the kernels that hide transfers under the matmul are better."""
MOST_COLUMNS = 16384
"""The longest row that a block normalises in its registers."""
SHORT_ROW = 8192
"""The longest row that a block of four warps does."""
MOST_RANKS = 16
BLOCKS = 128
"""Blocks to cut a call into, where segments do not become too narrow: about one an SM."""


@dataclass(frozen=True, eq=False)
class SmallParameters:
    """What may be tuned. (Compared by identity: ``parameters_of`` makes one for each size, and it is part of a key that
    is looked up at every call.)

    Attributes:
        two_shot: rows are summed by their owners and sent again, instead of by everybody.
        segment: columns that a block sends, a power of two.
        warps: of a block.
        replays: a call that comes again, its matmul too, is one launch of a CUDA graph (``runtime.replay``).
    """

    two_shot: bool
    segment: int
    warps: int = 8
    replays: bool = True


def settings_for(world_size: int, rows: int, columns: int, itemsize: int) -> dict[str, Any]:
    """The parameters for ``rows`` of ``columns`` elements.

    One-shot sends ``bytes * (W - 1)`` from each GPU, two-shot ``2 * bytes * (W - 1) / W``: a second leg pays where the
    difference takes longer.
    """
    two_shot = rows * columns * itemsize * (world_size - 1) * (world_size - 2) > world_size * LEG_BYTES
    width = max(_power_of_two(columns), 256)
    # A block of two-shot holds a segment for each peer: with many, narrower ones and smaller blocks are sooner done (8
    # H200s: 2 us; with 4 GPUs 1 us later).
    small_blocks = two_shot and world_size > 4 and columns <= SHORT_ROW
    # A thread stores 16 bytes: fewer columns than this leave some without.
    narrowest = 32 * (4 if small_blocks else 8) * 16 // itemsize
    units = -(-rows // world_size) if two_shot else max(rows, 1)
    segment = width
    while segment > narrowest and units * (width // segment) * 2 <= BLOCKS:
        segment //= 2
    return {"two_shot": two_shot, "segment": segment, "warps": 4 if small_blocks and segment <= 2 * narrowest else 8}


@functools.cache
def parameters_of(settings: str, world_size: int, rows: int, columns: int, itemsize: int) -> SmallParameters:
    """The parameters of a call of a site with a plan's ``settings``: JSON text of those that are fixed, ``{}`` where
    each call's rows decide."""
    return SmallParameters(**{**settings_for(world_size, rows, columns, itemsize), **json.loads(settings)})


def needed_up_to(settings: str, world_size: int, rows: int, columns: int, itemsize: int) -> tuple[int, int, str]:
    """``needed`` of a site with calls of 1 to ``rows`` rows (one-shot of fewer rows may need more than two-shot of
    more)."""
    sizes = columns, itemsize
    needs = [needed(parameters_of(settings, world_size, m, *sizes), world_size, m, *sizes) for m in range(1, rows + 1)]
    return max(n[0] for n in needs), max(n[1] for n in needs), HALVES


def units(parameters: SmallParameters, world_size: int, rows: int, columns: int) -> int:
    """Segments that a rank signals to each peer, in each leg."""
    return (-(-rows // world_size) if parameters.two_shot else rows) * -(-columns // parameters.segment)


def needed(
    parameters: SmallParameters, world_size: int, rows: int, columns: int, itemsize: int
) -> tuple[int, int, str]:
    """``(bytes, signals, protocol)`` that a call needs of its slot."""
    groups = -(-rows // world_size)
    held = world_size * groups + rows if parameters.two_shot else world_size * rows
    half = -(-held * columns * itemsize // 128) * 128
    return 2 * half, units(parameters, world_size, rows, columns) * (2 if parameters.two_shot else 1), HALVES


def why_not(dtype: torch.dtype, world_size: int, rows: int, columns: int) -> str | None:
    """What a small-message kernel is not made for: the all-reduce of ``[rows, columns]`` over ``world_size`` ranks."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"a small-message kernel sums fp16 or bf16, not {dtype}"
    if columns % 8 or not 0 < columns <= MOST_COLUMNS:
        return f"rows of {columns} elements are not whole 16-byte words of at most {MOST_COLUMNS} elements"
    if world_size > MOST_RANKS:
        return f"{world_size} ranks are more than the {MOST_RANKS} whose flags one block waits for"
    if rows * columns * dtype.itemsize > LIMIT_BYTES:
        return f"{rows * columns * dtype.itemsize} bytes are no small message; the limit is {LIMIT_BYTES}"
    return None


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

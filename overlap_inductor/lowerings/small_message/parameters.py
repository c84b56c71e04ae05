# SPDX-License-Identifier: Apache-2.0
"""Parameters, limits and workspace of schedule ``small_message``. This module does not import Triton."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from overlap_inductor.runtime.arena import HALVES

LEG_BYTES = 650_000
"""Bytes that a GPU sends in the fixed time of a second leg, about 2 us (4 and 8 H200s,
bench/results/small_message.jsonl)."""
LIMIT_BYTES = 8 << 20
"""Bytes of the largest all-reduce that the kernel computes. For larger ones, schedules that hide transfers are
faster."""
MOST_COLUMNS = 16384
"""Elements of the longest row that a block normalises in its registers."""
SHORT_ROW = 8192
"""Elements of the longest row for which a block may have four warps."""
MOST_RANKS = 16
"""Largest group: one block waits for the flags of all ranks."""
BLOCKS = 128
"""Segments (the columns that a block sends) are halved only if the call needs at most this many blocks with the halved
segments. This is about one block for each SM."""


@dataclass(frozen=True, eq=False)
class SmallParameters:
    """The tunable parameters, compared by identity like ``FusedParameters``.

    Attributes:
        two_shot: if true, each row is summed by one rank, the row's owner, which sends the sum. If false (one-shot),
            every rank sums every row.
        segment: columns that a block sends, a power of two.
        warps: warps of a block.
        replays: whether a repeated call, matmul included, is one launch of a CUDA graph (``runtime.replay``).
    """

    two_shot: bool
    segment: int
    warps: int = 8
    replays: bool = True


def settings_for(world_size: int, rows: int, columns: int, itemsize: int) -> dict[str, Any]:
    """The parameters for ``rows`` rows of ``columns`` elements of ``itemsize`` bytes.

    Each GPU sends ``bytes * (W - 1)`` in one-shot, and ``2 * bytes * (W - 1) / W`` in two-shot. Two-shot pays if the
    additional bytes of one-shot take longer than the fixed time of the second leg.
    """
    two_shot = rows * columns * itemsize * (world_size - 1) * (world_size - 2) > world_size * LEG_BYTES
    width = max(_power_of_two(columns), 256)
    # A block of two-shot holds a segment for each peer. With many peers, blocks of four warps are faster, by 2 us on
    # 8 H200s.
    small_blocks = two_shot and world_size > 4 and columns <= SHORT_ROW
    # A thread stores 16 bytes. In a segment of fewer columns than ``narrowest``, some threads would have nothing to
    # store.
    narrowest = 32 * (4 if small_blocks else 8) * 16 // itemsize
    units = -(-rows // world_size) if two_shot else max(rows, 1)
    segment = width
    while segment > narrowest and units * (width // segment) * 2 <= BLOCKS:
        segment //= 2
    return {"two_shot": two_shot, "segment": segment, "warps": 4 if small_blocks and segment <= 2 * narrowest else 8}


@functools.cache
def parameters_of(settings: str, world_size: int, rows: int, columns: int, itemsize: int) -> SmallParameters:
    """The parameters of a call. ``settings``: JSON text of the parameters that the plan fixes. The call's size decides
    the others."""
    return SmallParameters(**{**settings_for(world_size, rows, columns, itemsize), **json.loads(settings)})


def needed_up_to(settings: str, world_size: int, rows: int, columns: int, itemsize: int) -> tuple[int, int, str]:
    """The most bytes and the most signals that ``needed`` returns for 1 to ``rows`` rows. (One-shot of fewer rows may
    need more than two-shot of more rows.)"""
    sizes = columns, itemsize
    needs = [needed(parameters_of(settings, world_size, m, *sizes), world_size, m, *sizes) for m in range(1, rows + 1)]
    return max(n[0] for n in needs), max(n[1] for n in needs), HALVES


def units(parameters: SmallParameters, world_size: int, rows: int, columns: int) -> int:
    """The number of segments that a rank signals to each peer, in each leg."""
    return (-(-rows // world_size) if parameters.two_shot else rows) * -(-columns // parameters.segment)


def needed(
    parameters: SmallParameters, world_size: int, rows: int, columns: int, itemsize: int
) -> tuple[int, int, str]:
    """``(bytes, signals, protocol)`` of the symmetric memory that a call needs. Protocol ``HALVES``: one call uses one
    half of this memory, the next call the other half."""
    groups = -(-rows // world_size)
    held = world_size * groups + rows if parameters.two_shot else world_size * rows
    half = -(-held * columns * itemsize // 128) * 128
    return 2 * half, units(parameters, world_size, rows, columns) * (2 if parameters.two_shot else 1), HALVES


def why_not(dtype: torch.dtype, world_size: int, rows: int, columns: int) -> str | None:
    """Why the kernel does not support the all-reduce of ``[rows, columns]`` over ``world_size`` ranks, or ``None``."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"a small-message kernel sums fp16 or bf16, not {dtype}"
    if columns % 8 or not 0 < columns <= MOST_COLUMNS:
        return f"rows have {columns} elements; expected a multiple of 8 from 8 to {MOST_COLUMNS}"
    if world_size > MOST_RANKS:
        return f"the group has {world_size} ranks; expected at most {MOST_RANKS}, because one block waits for all ranks"
    if rows * columns * dtype.itemsize > LIMIT_BYTES:
        return f"{rows * columns * dtype.itemsize} bytes are too many for a small message; the limit is {LIMIT_BYTES}"
    return None


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

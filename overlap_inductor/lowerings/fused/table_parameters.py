# SPDX-License-Identifier: Apache-2.0
"""Parameters, limits and workspace of the fused lookup kernel. A *bag* is a list of indices; their rows in one table
give one result. This module does not import Triton."""

from __future__ import annotations

import functools
import json
from dataclasses import KW_ONLY
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_WIDTH = 1024
"""Largest number of elements of a row. Each of a block's 128 threads then holds 8 sums for each bag."""
MOST_RANKS = 1024
"""Largest group that the kernel accepts. For each rank of the group, a call needs flags and a counter."""
PIECES_A_BLOCK = 8
"""Pieces that a block claims on average, if there are enough bags. If blocks claimed fewer pieces, some blocks would
end long before others."""


@dataclass(frozen=True, eq=False)
class TableParameters:
    """The tunable parameters, compared by identity like ``FusedParameters``. They were not tuned on a GPU.

    Attributes:
        blocks: the device's number of SMs.
        blocks_an_sm: blocks of the grid for each SM. With more blocks, more loads are in flight.
        unroll: rows of each bag that a thread loads before it adds the first.
        bags: number of bags that a block looks up at once, a power of two. 0: the number is computed by
            ``bags_at_once``, so that each thread loads 16 bytes at once.
        most: a piece holds at most ``most`` times the number of bags that a block looks up at once.
        copies: number of parts in which a peer's results are copied out of the workspace. 0: the number of SMs.
        copy_words: int32 words that a block copies at once.
    """

    blocks: int
    _: KW_ONLY
    blocks_an_sm: int = 6
    unroll: int = 8
    warps: int = 4
    bags: int = 0
    most: int = 16
    copies: int = 0
    copy_words: int = 2048

    def bags_at_once(self, width: int, itemsize: int) -> int:
        return self.bags or max(1, self.warps * 32 * (16 // itemsize) // power_of_two(width))

    def piece_rows(self, rows: int, tables: int, world_size: int, bags: int) -> int:
        """Bags in one piece, a multiple of ``bags``. ``rows``: bags of the part of the batch that belongs to one
        rank."""
        turns = world_size * tables * -(-rows // bags) // (self.blocks * self.blocks_an_sm * PIECES_A_BLOCK)
        return bags * max(1, min(turns, self.most))


@functools.cache
def parameters_of(settings: str, blocks: int) -> TableParameters:
    return TableParameters(blocks, **json.loads(settings))


def needed(world_size: int, tables: int, rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs in its slot: room for the results of all ranks, and one signal."""
    return world_size * tables * rows * width * itemsize, 1


def why_not(dtype: torch.dtype, world_size: int, width: int) -> str | None:
    """Why the kernel cannot look up rows of ``width`` elements of ``dtype``; ``None`` if it can."""
    if dtype not in DTYPES:
        return f"the tables are {dtype}; expected fp32, fp16 or bf16"
    if width % (16 // dtype.itemsize) or not 0 < width <= MOST_WIDTH:
        return (
            f"rows have {width} elements of {dtype}, but the kernel stores vectors of 16 bytes; expected a multiple of"
            f" {16 // dtype.itemsize}, at most {MOST_WIDTH}"
        )
    if world_size > MOST_RANKS:
        return f"the group has {world_size} ranks; expected at most {MOST_RANKS}"
    return None


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()

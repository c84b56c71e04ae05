# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels that order the rows of pieces by expert (``kernels.row_order``)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from overlap_inductor.kernels import row_order
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.symmetric import stream_number
from overlap_inductor.torch_compat.triton_launch import PreparedKernel

BLOCKS, BLOCK = 64, 1024
"""Blocks of the kernels for each piece, and rows that a block reads at once."""
SMALL_BLOCKS, SMALL_BLOCK = 4, 32
"""The same in Triton's interpreter, which runs one block after the other."""
WIDE = 4
"""Fewest words for the ends of a piece, so that they are aligned to 16 bytes."""
EVEN = 16
"""Vectors of int64 begin at multiples of this many elements, so that they are aligned."""


Tensors = list[torch.Tensor]
Rows = tuple[int, int]
"""``(first row, end)``."""


class RowOrder:
    """The order of the rows of all pieces of a call (``kernels.row_order``).

    Args:
        index: ``[rows]``, integers.
        ends: int32 or int64 ``[experts]``.
        bounds: where the pieces begin among the arrived rows, in ascending order, and where the last one ends.
        returned: number of rows that return to this rank.
        only_ends: whether only ``ends`` will be read.
        launch: keeps the prepared kernels.

    Attributes:
        arrived, returned: int64 ``[1]`` on the device, the numbers of rows that arrive and return.
    """

    def __init__(
        self,
        index: torch.Tensor,
        ends: torch.Tensor,
        bounds: Sequence[int],
        returned: int,
        only_ends: bool,
        launch: Launch,
    ) -> None:
        self._numbers = {first: number for number, first in enumerate(bounds)}
        # The kernels are compiled for a number of pieces. Empty pieces at the end keep the number from changing often.
        pieces = 1 << (len(bounds) - 2).bit_length() if len(bounds) > 1 else 0
        rows, index, ends = bounds[-1], left_operand(index.to(torch.int64)), left_operand(ends)
        key = "ends", ends.dtype, pieces, ends.shape[0]
        counting = launch.kept.get(key)
        if counting is None:
            counting = launch.kept[key] = _Counting(index, ends, pieces)
        self.arrived, self.returned, self._ends = counting.arrived, counting.returned, counting.ends
        counting.tell([*bounds, *[rows] * (pieces + 1 - len(bounds)), returned])
        if rows:
            counting.count(index, ends)
        self._placed = [index] * 3
        if rows and not only_ends:
            self._placed = _placed(index, counting.bounds, rows, pieces, launch)

    def ends(self, piece: Rows) -> torch.Tensor:
        """int32 ``[experts]``: where each expert's rows end in the piece of the arrived rows ``piece``."""
        return self._ends[self._numbers[piece[0]]]

    def ordered(self, piece: Rows) -> torch.Tensor:
        """The places of the piece's rows among all rows in the order of the experts."""
        return self._placed[0][piece[0] : piece[1]]

    def places(self, piece: Rows) -> torch.Tensor:
        """The places of these rows in the piece, as they arrived."""
        return self._placed[1][piece[0] : piece[1]]

    def back(self, piece: Rows) -> torch.Tensor:
        """The number in the order of the experts of each row of the piece, as it arrived."""
        return self._placed[2][piece[0] : piece[1]]


class _Counting:
    """Finds where the experts' rows end in each piece, for a number of pieces and experts. All calls use the same
    memory, because they run one after the other (``runtime.call_order``). So the host allocates it once.

    Args:
        index, ends: see ``RowOrder``; int64 ``index``.

    Attributes:
        bounds: int64 ``[pieces + 2]`` on the device, what ``tell`` was given.
        arrived, returned, ends: see ``RowOrder``. ``ends`` has a tensor for each piece.
    """

    def __init__(self, index: torch.Tensor, ends: torch.Tensor, pieces: int) -> None:
        experts = ends.shape[0]
        wide = max(1 << (experts - 1).bit_length(), WIDE)
        found, ends_of = index.new_empty(2, pieces, wide, dtype=torch.int32).unbind()
        self.ends = ends_of[:, :experts].unbind()
        self.bounds = index.new_empty(pieces + 2)
        self.arrived, self.returned = self.bounds[-2:-1], self.bounds[-1:]
        self._copy, self._address = copier(index.device.type), self.bounds.data_ptr()
        if not pieces:
            return
        fixed = {
            "bounds": self.bounds,
            "found": found,
            "ends_of": ends_of,
            "finished": found.new_zeros(pieces),
            "experts": experts,
            "pieces": pieces,
            "EXPERTS": wide,
            "BLOCK": _sizes(index)[1],
        }
        varying = {"index": index, "ends": ends}
        self.count = PreparedKernel(row_order.count_by_expert, pieces * experts, varying, fixed, num_warps=4)
        """``count(index, ends)`` computes ``ends`` of the call. Call ``tell`` first."""

    def tell(self, numbers: Sequence[int]) -> None:
        """Copy ``[*bounds, returned]`` to the device. The host does not wait: CUDA copies so few bytes into its own
        memory first, and pinned memory would cost the host more time."""
        given = array("q", numbers)
        address, count = given.buffer_info()
        self._copy(self._address, address, count * given.itemsize, stream_number(self.bounds.device))


class _Places:
    """The kernels that find the rows' places, prepared for a number of pieces."""

    def __init__(
        self, index: torch.Tensor, bounds: torch.Tensor, counts: torch.Tensor, placed: list[torch.Tensor]
    ) -> None:
        blocks, block = _sizes(index)
        pieces = counts.numel() // blocks
        counted = {"index": index, "bounds": bounds, "counts": counts}
        grid = {"pieces": pieces, "BLOCKS": blocks, "BLOCK": block}
        self._count = PreparedKernel(row_order.count_rows, pieces * blocks, counted, grid, num_warps=4)
        varying = counted | dict(zip(("ordered", "places", "back"), placed))
        self._place = PreparedKernel(row_order.place_rows, pieces * blocks, varying, grid, num_warps=4)

    def __call__(
        self, index: torch.Tensor, bounds: torch.Tensor, counts: torch.Tensor, placed: list[torch.Tensor]
    ) -> None:
        self._count(index, bounds, counts)
        self._place(index, bounds, counts, *placed)


def _placed(index: torch.Tensor, bounds: torch.Tensor, rows: int, pieces: int, launch: Launch) -> Tensors:
    """``ordered``, ``places`` and ``back`` of all rows."""
    placed = list(index.new_empty(3, -(-rows // EVEN) * EVEN).unbind())
    counts = index.new_empty(pieces * _sizes(index)[0], dtype=torch.int32)
    key = "places", pieces
    start = launch.prepared.get(key)
    if start is None:
        start = _Places(index, bounds, counts, placed)
        launch.remember(key, start)
    start(index, bounds, counts, placed)
    return placed


def _sizes(index: torch.Tensor) -> tuple[int, int]:
    return (BLOCKS, BLOCK) if index.is_cuda else (SMALL_BLOCKS, SMALL_BLOCK)

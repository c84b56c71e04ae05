# SPDX-License-Identifier: Apache-2.0
"""Draws random programs that differ between ranks: a bias on one rank, a smaller K on the last ranks, or padding
before a transfer.

All ranks draw the same decisions and move tensors of equal shapes. Sizes are split as in DTensor, into pieces of
``ceil(size / world_size)``. The last pieces may be smaller or empty.

- Gather: a rank pads its piece to the full size. After the gather, all ranks cut off the padding.
- Reduce-scatter: every rank pads the whole tensor. Afterwards, the last ranks cut off their pieces' padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.support.random_programs import ANYTHING
from tests.support.random_programs import Program
from tests.support.random_programs import Shape

UNEVEN = 2 * ["one_bias", "own_columns", "own_rows", "own_scatter"] + 3 * ["own_inner"]


@dataclass
class UnevenProgram(Program):
    """The program of rank ``rank``."""

    rank: int = 0
    anything: ClassVar[list[str]] = ANYTHING + 2 * UNEVEN

    def _line(self, expression: str) -> str:
        """Add a line whose result may differ between ranks in shape or values. Later steps do not read it."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return name

    def _undivided(self) -> int:
        """Draw a size that mostly is no multiple of the number of ranks."""
        return self.chance.choice(
            [self.world_size + 1, 2 * self.world_size - 1, 2 * self.world_size + 1, 3 * self.world_size + 2, 4]
        )

    def _piece(self, total: int) -> tuple[int, int]:
        """The sizes of this rank's and of rank 0's piece of ``total``."""
        full = -(-total // self.world_size)
        return min(full, max(0, total - full * self.rank)), full

    def _padded(self, x: str, rank_of: int, dim: int, missing: int) -> str:
        """Add a line that pads ``x`` by ``missing`` zeros at the end of ``dim``."""
        return self._line(
            f"torch.nn.functional.pad({x}, {(0, 0) * (rank_of - 1 - dim) + (0, missing)})" if missing else x
        )

    def _joined(self, x: str, shape: Shape, dim: int) -> None:
        """Add lines that gather each rank's piece ``x`` along ``dim`` into a tensor of shape ``shape``."""
        own, full = self._piece(shape[dim])
        padded = self._padded(x, len(shape), dim, full - own)
        gathered = self._line(f"all_gather({padded}, {dim}, g)")
        pieces = [min(full, max(0, shape[dim] - full * r)) for r in range(self.world_size)]
        if self.chance.random() < 0.5:
            self._make(f"{gathered}.narrow({dim}, 0, {shape[dim]})", *shape)
        else:
            self._make(
                f"torch.cat([c.narrow({dim}, 0, p) for c, p in "
                f"zip({gathered}.chunk({self.world_size}, {dim}), {pieces})], {dim})",
                *shape,
            )

    def _one_bias(self, x: str, shape: Shape, dim: int) -> None:
        columns = self._columns()
        product, bias = f"{x} @ {self._input(shape[-1], columns)}", self._input(columns)
        self._make(product + f" + {bias}" * (self.rank == self.chance.randrange(self.world_size)), *shape[:-1], columns)

    def _own_inner(self, x: str, shape: Shape, dim: int) -> None:
        (own, _), columns = self._piece(self._undivided()), self._columns()
        inner = self._line(f"torch.relu({x} @ {self._input(shape[-1], own)})")
        self._make(f"{inner} @ {self._input(own, columns)}", *shape[:-1], columns)

    def _own_columns(self, x: str, shape: Shape, dim: int) -> None:
        total = self._undivided()
        own, _ = self._piece(total)
        bias = f" + {self._input(own)}" if self.chance.random() < 0.3 else ""
        self._joined(self._line(f"{x} @ {self._input(shape[-1], own)}{bias}"), (*shape[:-1], total), len(shape) - 1)

    def _own_rows(self, x: str, shape: Shape, dim: int) -> None:
        total, width = self._undivided(), self._width()
        own, _ = self._piece(total)
        self._joined(self._line(f"torch.tanh({self._input(own, width)})"), (total, width), 0)

    def _own_scatter(self, x: str, shape: Shape, dim: int) -> None:
        columns = self._columns()
        now = (*shape[:-1], columns)
        own, full = self._piece(now[dim])
        product = self._line(f"{x} @ {self._input(shape[-1], columns)}")
        padded = self._padded(product, len(now), dim, full * self.world_size - now[dim])
        op = "sum" if self.trains else self.chance.choice(["sum", "avg"])
        scattered = self._line(f"reduce_scatter({padded}, {op!r}, {dim}, g)")
        mine = self._line(f"{scattered}.narrow({dim}, 0, {own})" if own < full else scattered)
        if self.chance.random() < 0.5:
            self.ends.append(mine)
            return
        self._joined(self._line(f"torch.relu({mine})"), now, dim)

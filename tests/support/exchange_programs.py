# SPDX-License-Identifier: Apache-2.0
"""Draws random programs with all-to-alls. Some all-to-alls exchange equal parts of the rows. Other all-to-alls
change shards of one dim to shards of another, as in Ulysses and DTensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.support.random_programs import ANYTHING
from tests.support.random_programs import BEHIND
from tests.support.random_programs import Program
from tests.support.random_programs import Shape

EXCHANGES = ["exchange", "reshard", "reshard"]


@dataclass
class ExchangeProgram(Program):
    """A program in which all-to-alls are drawn more often than other collectives."""

    anything: ClassVar[list[str]] = ANYTHING + EXCHANGES
    behind: ClassVar[dict[str, list[str]]] = {
        "all_to_all": "mm mm sum batch side view transpose act".split(),
        "all_gather": BEHIND["all_gather"],
        "@": [*BEHIND["@"], *2 * EXCHANGES],
    }

    def _exchange(self, x: str, shape: Shape, dim: int) -> None:
        """Each rank sends an equal part of the rows to each rank."""
        if shape[0] % self.world_size == 0:
            self._make(f"all_to_all({x}, g)", *shape)

    def _reshard(self, x: str, shape: Shape, dim: int) -> None:
        """``x`` is sharded along a drawn dim, ``joined``. The result is sharded along ``dim``. The sent parts are
        stacked by views and a permutation, or by ``chunk`` and ``stack``."""
        ranks = self.world_size
        joined = self.chance.choice([d for d in range(len(shape)) if d != dim])
        if shape[dim] % ranks:
            return
        if self.chance.random() < 0.5:
            parts = f"torch.stack({x}.chunk({ranks}, {dim}))"
        else:
            cut = self._changed(shape, dim, shape[dim] // ranks)
            parts = f"{x}.reshape({', '.join(map(str, (*shape[:dim], ranks, *cut[dim:])))}).movedim({dim}, 0)"
        small = self._changed(shape, dim, shape[dim] // ranks)
        result = self._changed(small, joined, shape[joined] * ranks)
        received = f"all_to_all({parts}, g)"
        if self.chance.random() < 0.5:
            self._make(f"torch.cat({received}.unbind(0), {joined})", *result)
        else:
            self._make(f"{received}.movedim(0, {joined}).reshape({', '.join(map(str, result))})", *result)

# SPDX-License-Identifier: Apache-2.0
"""What a site of pattern ``embedding_all_to_all`` computes in stress checks: tables and indices, the call of the op,
and the fp64 result."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from bench.support.lookups import TOLERANCE
from bench.support.lookups import LookupCase
from bench.support.lookups import LookupSite
from overlap_inductor.lowerings.fused.table_parameters import needed
from tests.gpu.stress_patterns import Sizes
from tests.gpu.stress_variants import LookupWay

TABLES = 8
"""About how many tables a rank has. The width of a row is rounded up to a multiple of ``MULTIPLE``."""
MULTIPLE = 8
"""The number of elements of 2 bytes in a vector of 16 bytes. The kernel needs rows of whole vectors."""


class Lookups:
    """Calls of one shape. ``sizes.tokens``: results that a rank looks up in each of its tables; ``sizes.inner``: rows
    of a table; ``sizes.columns``: about the sum of the widths of a rank's tables."""

    def __init__(self, way: LookupWay, sizes: Sizes) -> None:
        width = -(-sizes.columns // (TABLES * MULTIPLE)) * MULTIPLE
        self.way, self.ranks = way, sizes.ranks
        self.case = LookupCase(
            max(1, sizes.columns // width), sizes.tokens, width, way.pooling, sizes.inner, way.mode, way.dtype, True
        )

    def needed(self) -> tuple[int, int]:
        """``(bytes, signals)`` of a call in the workspace."""
        case = self.case
        return needed(self.ranks, case.tables, case.batch // self.ranks, case.width, case.dtype.itemsize)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.case.dtype]

    def drawn(self, rank: int, seed: int, device: torch.device) -> LookupSite:
        """The operands of ``rank``."""
        return LookupSite(self.case, device, seed, rank)

    def call(
        self, op: Any, chain: torch.Tensor, mine: LookupSite, saves: bool, settings: str, *where: str
    ) -> Callable[[], torch.Tensor]:
        """A call of ``op``. ``mine``: this rank's operands. ``where``: the names of the group and of the site.

        The call returns the result of the all-to-all, flat. With ``saves``, two tensors for each table follow: the bag
        of each index, and each bag's number of indices. Both are divided by the number of bags.
        """
        way, case = self.way, self.case
        indices = [i.to(way.index) for i in mine.indices]
        offsets = [(o if way.last_offset else o[:-1]).to(way.index) for o in mine.offsets]
        mode, padding = "mean" if way.mode == "mean" else "sum", [-1] * case.tables

        def run() -> torch.Tensor:
            (out, *saved), _ = op(
                chain, mine.tables, indices, offsets, mine.samples, padding, mode, way.last_offset,
                not way.tables_first, saves, settings, *where,
            )  # fmt: skip
            if not saves:
                return out
            pairs = zip(saved[::3], saved[1::3], strict=True)
            # With ``last_offset``, there is one count more than bags.
            kept = [t for bags, counts in pairs for t in (bags, counts[: case.batch])]
            return torch.cat([out, *map(self._scaled, kept)])

        return run

    def exact(self, every: Sequence[LookupSite], rank: int, saves: bool) -> torch.Tensor:
        """The result of ``call`` on ``rank``, in fp64. ``every``: the operands of all ranks."""
        slots = [torch.stack([t.chunk(self.ranks)[rank] for t in site.pooled()]) for site in every]
        found = [(slot if self.way.tables_first else slot.transpose(0, 1)).flatten() for slot in slots]
        for offsets in every[rank].offsets if saves else ():
            lengths = offsets.diff()
            bags = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
            found += [self._scaled(bags).double(), self._scaled(lengths).double()]
        return torch.cat(found)

    def _scaled(self, saved: torch.Tensor) -> torch.Tensor:
        """``saved``, scaled so that its largest element is at most 1. If it were larger than the looked up rows, the
        rows could have larger errors, because errors are relative to the largest element."""
        return saved.to(self.case.dtype) / self.case.batch

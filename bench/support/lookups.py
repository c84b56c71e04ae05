# SPDX-License-Identifier: Apache-2.0
"""Lookups in a rank's tables, and the all-to-all that follows them, as in a DLRM. The data is random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest error that is allowed, relative to the largest element."""


@dataclass(frozen=True)
class LookupCase:
    """One case on this rank.

    Attributes:
        tables: tables of each rank.
        batch: number of results that a rank looks up in each table. A result is the sum or mean of the rows of one
            *bag* of indices, or without bags the row of one index. The all-to-all divides the results among the ranks.
        width: elements of a row.
        pooling: number of indices of a bag; the average number if ``jagged``. 0: there are no bags, and each index
            gives one row (``embedding``).
        height: rows of a table.
        mode: ``sum``, ``mean``, or ``weighted``: a sum in which each index of a bag has its own weight.
        jagged: bags have 0 to ``2 * pooling`` indices.
    """

    tables: int
    batch: int
    width: int
    pooling: int
    height: int = 100_000
    mode: str = "sum"
    dtype: torch.dtype = torch.float32
    jagged: bool = False

    def __str__(self) -> str:
        kind = f"{self.mode} of {self.pooling}{' jagged' if self.jagged else ''}" if self.pooling else "rows"
        return f"{self.tables} tables, batch {self.batch}, width {self.width}, {kind}"

    @property
    def sent(self) -> int:
        """Bytes that the all-to-all moves, including this rank's own slice."""
        return self.tables * self.batch * self.width * self.dtype.itemsize

    @property
    def memory(self) -> int:
        """About how many bytes a rank holds: tables, indices, and four tensors of ``sent`` bytes each."""
        indices = 8 * self.tables * self.batch * max(self.pooling, 1)
        return self.tables * self.height * self.width * self.dtype.itemsize + indices + 4 * self.sent


class LookupSite:
    """The operands of a case on ``rank``; default: this rank. ``operands`` are the arguments of ``plain``."""

    def __init__(self, case: LookupCase, device: torch.device, seed: int = 0, rank: int | None = None) -> None:
        self.case, self.group = case, dist.group.WORLD
        rank = dist.get_rank() if rank is None else rank
        generator = torch.Generator(device).manual_seed(1000 * rank + seed)
        kind = {"device": device, "generator": generator}
        self.tables = [torch.randn(case.height, case.width, dtype=case.dtype, **kind) for _ in range(case.tables)]
        self.offsets = [self._offsets(kind) for _ in self.tables] if case.pooling else []
        counts = [int(o[-1]) for o in self.offsets] or [case.batch] * case.tables
        self.indices = [torch.randint(case.height, (n,), **kind) for n in counts]
        weighted = case.mode == "weighted"
        self.samples = [torch.rand(n, dtype=case.dtype, **kind) for n in counts] if weighted else []
        self.operands = (self.tables, self.indices, self.offsets, self.samples)

    def _offsets(self, kind: dict[str, object]) -> torch.Tensor:
        """The position in a table's ``indices`` at which each bag begins, and the end of the last bag."""
        case = self.case
        device = kind["device"]
        if not case.jagged:
            return torch.arange(case.batch + 1, device=device) * case.pooling  # type: ignore[arg-type]
        lengths = torch.randint(2 * case.pooling + 1, (case.batch,), **kind)  # type: ignore[call-overload]
        return F.pad(lengths.cumsum(0), (1, 0))

    def plain(
        self,
        tables: list[torch.Tensor],
        indices: list[torch.Tensor],
        offsets: list[torch.Tensor],
        samples: list[torch.Tensor],
    ) -> torch.Tensor:
        """The case as a model computes it: ``[batch, tables * width]`` is sent."""
        if not offsets:
            return self.exchange(torch.cat([F.embedding(i, t) for t, i in zip(tables, indices, strict=True)], 1))
        mode = "mean" if self.case.mode == "mean" else "sum"
        pooled = [
            F.embedding_bag(
                i, t, o, mode=mode, per_sample_weights=samples[n] if samples else None, include_last_offset=True
            )
            for n, (t, i, o) in enumerate(zip(tables, indices, offsets, strict=True))
        ]
        return self.exchange(torch.cat(pooled, 1))

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_to_all_single(pooled, None, None, self.group))

    def expected(self) -> torch.Tensor:
        """The right result in fp64, exchanged by the group's backend."""
        return self.exchange(torch.cat(self.pooled(), 1))

    def pooled(self) -> list[torch.Tensor]:
        """The right results of each table in fp64, before the exchange: rows, or their sums or means."""
        pooled = []
        for n, table in enumerate(self.tables):
            wide, indices = table.double(), self.indices[n]
            if not self.offsets:
                pooled.append(wide[indices])
                continue
            lengths = self.offsets[n].diff()
            rows = wide[indices] * (self.samples[n].double()[:, None] if self.samples else 1)
            found = torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0)
            pooled.append(found / lengths.clamp(min=1)[:, None] if self.case.mode == "mean" else found)
        return pooled

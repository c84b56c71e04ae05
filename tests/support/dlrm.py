# SPDX-License-Identifier: Apache-2.0
"""A recommendation model as DLRM writes it (Naumov et al., arXiv:1906.00091), with tables divided among the ranks.

Each rank looks up the whole batch in its own tables. An all-to-all then gives each rank the results of all tables for
its slice of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn


@dataclass(frozen=True)
class Batch:
    """What one rank looks up. For each of its tables: the indices of the whole batch and, if bags have 1-D indices, the
    offset of each bag.

    Attributes:
        dense: dense features of the rank's own slice of the batch.
        weights: for each table, a weight for each index; ``None`` for bags without weights.
    """

    dense: torch.Tensor
    indices: list[torch.Tensor]
    offsets: list[torch.Tensor | None]
    weights: list[torch.Tensor] | None = None

    def arguments(self) -> tuple[object, ...]:
        return self.dense, self.indices, self.offsets, self.weights


class DLRM(nn.Module):
    """The model.

    Args:
        kind: ``sum``, ``mean``, ``max`` (bags of this mode) or ``embedding`` (one index for each row of the batch).
        joined: how the tables' results are sent. ``cat``: ``[batch, tables * width]``. ``stack``: ``[batch, tables,
            width]``. ``tables first``: flattened ``[ranks, tables, batch / ranks, width]``.
    """

    def __init__(
        self, tables: int, rows: int, width: int, features: int, kind: str = "sum", joined: str = "cat"
    ) -> None:
        super().__init__()
        self.group, self.joined = dist.group.WORLD, joined
        made = [
            nn.Embedding(rows, width) if kind == "embedding" else nn.EmbeddingBag(rows, width, mode=kind)
            for _ in range(tables)
        ]
        self.tables = nn.ModuleList(made)
        self.bottom = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.pairs = tables * self.group.size() + 1
        self.top = nn.Sequential(nn.Linear(width + self.pairs**2, 16), nn.ReLU(), nn.Linear(16, 1))

    def looked_up(
        self,
        indices: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        found = []
        for i, table in enumerate(self.tables):
            if isinstance(table, nn.Embedding):
                found.append(table(indices[i]))
            else:
                found.append(table(indices[i], offsets[i], None if weights is None else weights[i]))
        return found

    def exchanged(self, pooled: list[torch.Tensor]) -> torch.Tensor:
        """``[batch / ranks, all tables, width]``."""
        ranks, tables, (batch, width) = self.group.size(), len(pooled), pooled[0].shape
        mine = batch // ranks
        exchange = funcol.all_to_all_single_autograd if torch.is_grad_enabled() else funcol.all_to_all_single
        if self.joined == "tables first":
            sent = torch.stack(pooled).view(tables, ranks, mine, width).transpose(0, 1).reshape(-1)
            return exchange(sent, None, None, self.group).view(ranks * tables, mine, width).transpose(0, 1)
        sent = torch.cat(pooled, 1) if self.joined == "cat" else torch.stack(pooled, 1)
        received = exchange(sent, None, None, self.group).view(ranks, mine, tables, width)
        return received.transpose(0, 1).reshape(mine, ranks * tables, width)

    def forward(
        self,
        dense: torch.Tensor,
        indices: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        sparse = self.exchanged(self.looked_up(indices, offsets, weights))
        features = self.bottom(dense)
        every = torch.cat([features.unsqueeze(1), sparse], 1)
        return self.top(torch.cat([features, (every @ every.transpose(1, 2)).flatten(1)], 1))


def batch_of(
    model: DLRM, mine: int, longest: int, generator: torch.Generator, *, square: bool = False, weighted: bool = False
) -> Batch:
    """A random batch of ``mine`` rows for each rank.

    Args:
        longest: without ``square``, bags have 0 to ``longest`` indices.
        square: each bag has ``max(longest, 1)`` indices. The indices of a table of bags are 2-D, with a row for each
            bag.
    """
    whole = mine * model.group.size()
    dense = torch.randn(mine, model.bottom[0].in_features, generator=generator)
    indices: list[torch.Tensor] = []
    offsets: list[torch.Tensor | None] = []
    for table in model.tables:
        if isinstance(table, nn.Embedding) or square:
            shape = (whole,) if isinstance(table, nn.Embedding) else (whole, max(longest, 1))
            indices.append(torch.randint(table.weight.shape[0], shape, generator=generator))
            offsets.append(None)
            continue
        lengths = torch.randint(longest + 1, (whole,), generator=generator)
        indices.append(torch.randint(table.weight.shape[0], (int(lengths.sum()),), generator=generator))
        offsets.append(lengths.cumsum(0) - lengths)
    weights = [torch.rand(i.shape, generator=generator) for i in indices] if weighted else None
    return Batch(dense, indices, offsets, weights)

# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that are divided among the ranks, as ``transformers`` computes it at inference. Each rank
multiplies the rows of its own experts, and an all-reduce adds the ranks' sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 16, 24
Loads = Callable[[int, torch.Generator], torch.Tensor]

LOADS: dict[str, Loads] = {
    "random": lambda tokens, made: torch.randint(0, EXPERTS, (tokens, CHOSEN), generator=made),
    "an empty expert on each rank": lambda tokens, made: (
        2 * torch.randint(0, EXPERTS // 2, (tokens, CHOSEN), generator=made)
    ),
    "all tokens on one expert": lambda tokens, made: torch.full((tokens, CHOSEN), EXPERTS - 1),
    "all tokens on the first rank": lambda tokens, made: torch.randint(0, 2, (tokens, CHOSEN), generator=made),
    "uneven": lambda tokens, made: torch.stack([torch.zeros(tokens).long(), torch.arange(tokens) % EXPERTS], 1),
}
"""The experts' ids of each token."""


class Experts(torch.nn.Module):
    """``AllReduceEP`` and ``grouped_mm_experts_forward`` of ``transformers``. The rank is a constant of the graph.

    Args:
        places: how the rows are brought back: ``put`` (as ``transformers`` does), ``argsort``, or ``negative``: indices
            that count from the end.
        late: whether the weights are applied after the rows were brought back.
        reduce: the collective.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        places: str = "put",
        late: bool = False,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.rank, self.local = rank, EXPERTS // world_size
        self.all_up = torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=made) / HIDDEN**0.5
        self.all_down = torch.randn(EXPERTS, INNER, HIDDEN, generator=made) / INNER**0.5
        own = slice(rank * self.local, (rank + 1) * self.local)
        self.up, self.down = self.all_up[own].clone(), self.all_down[own].clone()
        self.places, self.late = places, late
        self.reduce = reduce or (lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up.to(x.dtype), self.down.to(x.dtype)
        others = (ids // self.local) != self.rank
        ids = torch.where(others, self.local, ids % self.local)
        weights = weights.masked_fill(others, 0.0)
        ordered, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(ordered.float(), bins=self.local, min=0, max=self.local - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        masked = (ordered >= self.local).unsqueeze(-1)
        rows = x[order // CHOSEN].masked_fill(masked, 0.0)
        gate, values = torch._grouped_mm(rows, up, offs=ends).masked_fill(masked, 0.0).chunk(2, -1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * values, down, offs=ends).masked_fill(masked, 0.0)
        if not self.late:
            y = y * weights.reshape(-1)[order].unsqueeze(-1)
        y = y[self._back(order)].view(x.shape[0], CHOSEN, HIDDEN)
        if self.late:
            y = y * weights.unsqueeze(-1)
        return self.reduce(y.sum(1))

    def _back(self, order: torch.Tensor) -> torch.Tensor:
        if self.places == "argsort":
            return torch.argsort(order)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return back if self.places == "put" else back - order.shape[0]

    def whole(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The result of all experts, without a grouped matmul, in the dtype of ``x``."""
        result = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.all_up.to(x.dtype), self.all_down.to(x.dtype), strict=True)):
            gate, values = (x @ up).chunk(2, -1)
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            result += (torch.nn.functional.silu(gate) * values) @ down * share
        return result


def inputs(tokens: int, loads: str = "random") -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=made).bfloat16()
    return x, LOADS[loads](tokens, made), torch.rand(tokens, CHOSEN, generator=made).bfloat16()

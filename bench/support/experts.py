# SPDX-License-Identifier: Apache-2.0
"""Two layers whose experts are divided among the ranks.

- ``Experts``: the layer of ``transformers`` at inference. Each rank multiplies the rows of its own experts, and an
  all-reduce adds the ranks' sums.
- ``DispatchedExperts``: the layer of torchtitan, with the ops of ``AllToAllTokenDispatcher`` and ``GroupedExperts``.
  Rows travel to their experts and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

Sizes = list[int]
Weights = list[torch.Tensor]
Exchange = Callable[[torch.Tensor, Sizes, Sizes], torch.Tensor]


@dataclass(frozen=True)
class ExpertSizes:
    """``experts``: number of experts on all ranks together. ``chosen``: number of experts for each token. ``hidden``,
    ``inner``: widths of an expert."""

    experts: int = 8
    chosen: int = 2
    hidden: int = 16
    inner: int = 24


SMALL = ExpertSizes()


def exchanged(x: torch.Tensor, received: Sizes, sent: Sizes) -> torch.Tensor:
    """The all-to-all of the rows ``x`` among all ranks. ``received`` and ``sent``: the number of rows from and
    to each rank."""
    return funcol.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


class Experts(torch.nn.Module):
    """Does what ``AllReduceEP`` and ``grouped_mm_experts_forward`` of ``transformers`` do. The rank is a constant of
    the graph.

    Args:
        places: how rows get back into the tokens' order: ``put`` (as in ``transformers``), ``argsort``, or ``negative``
            indices.
        late: whether rows are multiplied by the weights of their tokens after the rows are back in that order, rather
            than before.
        reduce: the collective that adds the ranks' sums. ``None``: an all-reduce.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        places: str = "put",
        late: bool = False,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sizes: ExpertSizes = SMALL,
    ) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
        self.sizes, self.rank, self.local = sizes, rank, experts // world_size
        self.all_up = torch.randn(experts, hidden, 2 * inner, generator=made) / hidden**0.5
        self.all_down = torch.randn(experts, inner, hidden, generator=made) / inner**0.5
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
        rows = x[order // self.sizes.chosen].masked_fill(masked, 0.0)
        y = self._computed(rows, ordered, [up, down], ends, masked).masked_fill(masked, 0.0)
        if not self.late:
            y = y * weights.reshape(-1)[order].unsqueeze(-1)
        y = y[self._back(order)].view(x.shape[0], self.sizes.chosen, self.sizes.hidden)
        if self.late:
            y = y * weights.unsqueeze(-1)
        return self.reduce(y.sum(1))

    def _computed(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: Weights, ends: torch.Tensor, masked: torch.Tensor
    ) -> torch.Tensor:
        """The rows that this rank's experts compute from ``rows``. ``ids``: the expert of each row, ascending."""
        up, down = weights
        gate, values = torch._grouped_mm(rows, up, offs=ends).masked_fill(masked, 0.0).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * values, down, offs=ends)

    def _back(self, order: torch.Tensor) -> torch.Tensor:
        if self.places == "argsort":
            return torch.argsort(order)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return back if self.places == "put" else back - order.shape[0]

    def whole(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The result of all experts, computed without a grouped matmul, in the dtype of ``x``."""
        result = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.all_up.to(x.dtype), self.all_down.to(x.dtype), strict=True)):
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            result += self._expert(x, expert, up, down) * share
        return result

    def _expert(self, x: torch.Tensor, expert: int, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """The rows that ``expert`` computes from ``x`` with weights ``up`` and ``down``."""
        gate, values = (x @ up).chunk(2, -1)
        return (F.silu(gate) * values) @ down


class DispatchedExperts(torch.nn.Module):
    """The experts of ``rank``, and the exchange of rows with the other ranks.

    Args:
        shared: whether a shared expert also multiplies all tokens of the rank.
        exchange: the function that exchanges rows. With ``lambda x, received, sent: x``, the rows stay on their rank.
        blocking: copy both lists of numbers of rows to the host with blocking copies. torchtitan starts the first copy
            and waits only for the second one. Inductor reads the first list before the second copy (torch 2.11), so it
            may read the numbers of an earlier call.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        shared: bool = False,
        sizes: ExpertSizes = SMALL,
        exchange: Exchange = exchanged,
        blocking: bool = False,
    ) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
        self.world_size, self.sizes, self.exchange, self.blocking = world_size, sizes, exchange, blocking

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        shapes = [(experts, inner, hidden), (experts, hidden, inner), (experts, inner, hidden)]
        self.all_weights: Weights = [weight(*s) for s in (*shapes, (hidden, inner), (inner, hidden))]
        self.own = slice(rank * experts // world_size, (rank + 1) * experts // world_size)
        self.w1, self.w2, self.w3 = (torch.nn.Parameter(w[self.own].clone()) for w in self.all_weights[:3])
        self.shared = shared
        if shared:
            self.up, self.down = (torch.nn.Parameter(w.clone()) for w in self.all_weights[3:])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``x [T, H]``, ``ids [T, k]`` and ``scores [T, k]``: the tokens, their experts, and the experts' weights."""
        counts = torch.histc(ids.reshape(-1).float(), bins=self.sizes.experts, min=0, max=self.sizes.experts).long()
        order = torch.argsort(ids.reshape(-1), stable=True)
        ordered_scores, tokens = scores.reshape(-1)[order].reshape(-1, 1), order // self.sizes.chosen
        rows = x[tokens]
        with torch.no_grad():
            by_rank = counts.view(self.world_size, -1)
            arriving = funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD)
            arriving = torch.ops._c10d_functional.wait_tensor(arriving).reshape(-1)
            # The first copy does not block. The second one returns when both are done.
            to_each = by_rank.sum(dim=1).to(torch.device("cpu"), non_blocking=not self.blocking)
            from_each = arriving.view(self.world_size, -1).sum(dim=1).to(torch.device("cpu"))
            sent, received = to_each.tolist(), from_each.tolist()
        arrived = self.exchange(rows, received, sent)
        shape, arrived, places, each = self._permute(arrived, arriving)
        returned = self._experts(arrived, each)
        back = returned.new_empty(shape)
        back[places, :] = returned
        returned = self.exchange(back, sent, received)
        returned = (returned.float() * ordered_scores).to(returned.dtype)
        out = torch.zeros_like(x).scatter_add(0, tokens.reshape(-1, 1).expand(-1, x.shape[-1]), returned)
        return out + self._shared(x) if self.shared else out

    def _permute(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[Any, ...]:
        """Sort ``rows`` by expert. ``counts``: numbers of rows, by rank and then by expert.

        Returns the shape of ``rows``, the sorted rows, the index of each sorted row in ``rows``, and the number of rows
        of each expert.
        """
        by_rank = counts.view(self.world_size, -1)
        starts = (counts.cumsum(0) - counts).view(self.world_size, -1).t().reshape(-1)
        lengths = by_rank.t().reshape(-1)
        segments = torch.arange(lengths.shape[0], device=rows.device).repeat_interleave(
            lengths, output_size=rows.shape[0]
        )
        ends = lengths.cumsum(0) - lengths
        places = starts[segments] + torch.arange(segments.shape[0], device=rows.device) - ends[segments]
        return rows.shape, rows[places, :], places, by_rank.sum(0)

    def _experts(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(torch._grouped_mm(x.bfloat16(), w1, offs=ends))
        h = h * torch._grouped_mm(x.bfloat16(), w3, offs=ends)
        return torch._grouped_mm(h, w2, offs=ends).type_as(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ self.up.to(x.dtype)) @ self.down.to(x.dtype)

    def whole(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The result of all experts, without a grouped matmul. ``weights``: ``all_weights``, in the dtype of ``x``."""
        w1, w2, w3, up, down = weights
        result = F.silu(x @ up) @ down if self.shared else torch.zeros_like(x)
        for expert in range(self.sizes.experts):
            share = (scores * (ids == expert)).sum(1, keepdim=True)
            y = (F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())) @ w2[expert].t()
            result = result + y * share
        return result

# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that are divided among the ranks, as torchtitan's ``AllToAllTokenDispatcher`` and
``GroupedExperts`` write it, from the same public ops in the same order.

Each rank sorts its ``(token, expert)`` rows by expert and sends each rank the rows of its experts. A rank brings the
rows that it received into the order of its experts, multiplies them, brings them back and returns them. The ranks
exchange their counts first, so the numbers of rows are unbacked symbols (``capture_scalar_outputs``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from tests.support.expert_layers import CHOSEN
from tests.support.expert_layers import EXPERTS
from tests.support.expert_layers import HIDDEN
from tests.support.expert_layers import INNER
from tests.support.expert_layers import LOADS

Sizes = list[int]
Weights = list[torch.Tensor]


def _exchange(x: torch.Tensor, received: Sizes, sent: Sizes) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


class DispatchedExperts(torch.nn.Module):
    """The experts of ``rank``, and the exchange of rows with the other ranks.

    Args:
        shared: whether a shared expert multiplies all tokens of the rank, too.
    """

    def __init__(self, rank: int, world_size: int, shared: bool = False) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.world_size = world_size

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        shapes = [(EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN)]
        self.all_weights: Weights = [weight(*s) for s in (*shapes, (HIDDEN, INNER), (INNER, HIDDEN))]
        self.own = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
        self.w1, self.w2, self.w3 = (torch.nn.Parameter(w[self.own].clone()) for w in self.all_weights[:3])
        self.shared = shared
        if shared:
            self.up, self.down = (torch.nn.Parameter(w.clone()) for w in self.all_weights[3:])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``x [T, H]``, ``ids [T, k]`` and ``scores [T, k]``: the tokens, their experts, and the experts' weights."""
        counts = torch.histc(ids.reshape(-1).float(), bins=EXPERTS, min=0, max=EXPERTS).long()
        order = torch.argsort(ids.reshape(-1), stable=True)
        ordered_scores, tokens = scores.reshape(-1)[order].reshape(-1, 1), order // CHOSEN
        rows = x[tokens]
        with torch.no_grad():
            by_rank = counts.view(self.world_size, -1)
            arriving = funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD)
            arriving = torch.ops._c10d_functional.wait_tensor(arriving).reshape(-1)
            sent = by_rank.sum(dim=1).to(torch.device("cpu"), non_blocking=True).tolist()
            received = arriving.view(self.world_size, -1).sum(dim=1).to(torch.device("cpu")).tolist()
        arrived = _exchange(rows, received, sent)
        shape, arrived, places, each = self._permute(arrived, arriving)
        returned = self._experts(arrived, each)
        back = returned.new_empty(shape)
        back[places, :] = returned
        returned = _exchange(back, sent, received)
        returned = (returned.float() * ordered_scores).to(returned.dtype)
        out = torch.zeros_like(x).scatter_add(0, tokens.reshape(-1, 1).expand(-1, x.shape[-1]), returned)
        return out + self._shared(x) if self.shared else out

    def _permute(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[Any, ...]:
        """``(shape of rows, rows in the order of the experts, their places in rows, rows of each expert)``. ``counts``:
        by rank, then by expert."""
        by_rank = counts.view(self.world_size, -1)
        starts = (counts.cumsum(0) - counts).view(self.world_size, -1).t().reshape(-1)
        lengths = by_rank.t().reshape(-1)
        segments = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=rows.shape[0])
        ends = lengths.cumsum(0) - lengths
        places = starts[segments] + torch.arange(segments.shape[0]) - ends[segments]
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
        """The result of all experts, without a grouped matmul. ``weights``: those of ``all_weights``."""
        w1, w2, w3, up, down = weights
        result = F.silu(x @ up) @ down if self.shared else torch.zeros_like(x)
        for expert in range(EXPERTS):
            share = (scores * (ids == expert)).sum(1, keepdim=True)
            y = (F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())) @ w2[expert].t()
            result = result + y * share
        return result


class LoopedExperts(DispatchedExperts):
    """The same layer with a loop over this rank's experts, as torchtitan's ``_run_experts_for_loop`` writes it: one
    ``mm`` of each expert's rows. The rows of an expert are an unbacked symbol each."""

    def _experts(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, counts.tolist())
        weights = zip(parts, self.w1, self.w2, self.w3, strict=True)
        return torch.cat(
            [
                (F.silu(rows @ w1.to(x.dtype).t()) * (rows @ w3.to(x.dtype).t())) @ w2.to(x.dtype).t()
                for rows, w1, w2, w3 in weights
            ]
        )


def inputs(tokens: int, loads: str, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of ``rank``, their experts by ``expert_layers.LOADS``, and their scores."""
    made = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, HIDDEN, generator=made).to(dtype)
    return x, LOADS[loads](tokens, made), torch.rand(tokens, CHOSEN, generator=made)

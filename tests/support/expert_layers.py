# SPDX-License-Identifier: Apache-2.0
"""Inputs of the layer ``bench.support.experts.Experts``, and variants of the layer. The inputs divide the tokens
among the experts in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.support.experts import SMALL
from bench.support.experts import Experts

Loads = Callable[[int, torch.Generator], torch.Tensor]

LOADS: dict[str, Loads] = {
    "random": lambda tokens, made: torch.randint(0, SMALL.experts, (tokens, SMALL.chosen), generator=made),
    "an empty expert on each rank": lambda tokens, made: (
        2 * torch.randint(0, SMALL.experts // 2, (tokens, SMALL.chosen), generator=made)
    ),
    "all tokens on one expert": lambda tokens, made: torch.full((tokens, SMALL.chosen), SMALL.experts - 1),
    "all tokens on the first rank": lambda tokens, made: torch.randint(0, 2, (tokens, SMALL.chosen), generator=made),
    "uneven": lambda tokens, made: torch.stack([torch.zeros(tokens).long(), torch.arange(tokens) % SMALL.experts], 1),
}
"""``{name: function that draws, for each token, the ids of its experts}``."""


def inputs(tokens: int, loads: str = "random") -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SMALL.hidden, generator=made).bfloat16()
    return x, LOADS[loads](tokens, made), torch.rand(tokens, SMALL.chosen, generator=made).bfloat16()


def gated(
    x: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
) -> torch.Tensor:
    """A loop over experts ``up [experts, h, inner]``, ``down [experts, inner, h]``. Expert e counts with the factor
    ``shares[..., e]``."""
    out = torch.zeros_like(x)
    for e in range(up.shape[0]):
        out = out + shares[..., e : e + 1] * (activation(x @ up[e]) @ down[e])
    return out


class BiasedExperts(Experts):
    """``GptOssExperts`` of ``transformers``: each expert has biases, and the columns of gate and values alternate."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        made = torch.Generator().manual_seed(1)
        self.all_biases = [torch.randn(SMALL.experts, n, generator=made) for n in (2 * SMALL.inner, SMALL.hidden)]
        own = slice(rank * self.local, (rank + 1) * self.local)
        self.first, self.second = (bias[own].clone() for bias in self.all_biases)

    def _computed(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: list[torch.Tensor],
        ends: torch.Tensor,
        masked: torch.Tensor,
    ) -> torch.Tensor:
        (up, down), mine = weights, ids.clamp(max=self.local - 1)
        y = (torch._grouped_mm(rows, up, offs=ends) + self.first.to(rows.dtype)[mine]).masked_fill(masked, 0.0)
        return torch._grouped_mm(self._activated(y), down, offs=ends) + self.second.to(rows.dtype)[mine]

    def _expert(self, x: torch.Tensor, expert: int, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        first, second = (bias[expert].to(x.dtype) for bias in self.all_biases)
        return self._activated(x @ up + first) @ down + second

    def _activated(self, y: torch.Tensor) -> torch.Tensor:
        gate, values = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (values + 1)


class LoopedExperts(Experts):
    """A loop computes each expert of the rank for all tokens ``x [T, hidden]``. The factor of an expert is ``[T, 1]``,
    and 0 for the tokens that did not choose it."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for local, (up, down) in enumerate(zip(self.up.to(x.dtype), self.down.to(x.dtype), strict=True)):
            expert = self.rank * self.local + local
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            result = result + (self._expert(x, expert, up, down) * share).to(x.dtype)
        return self.reduce(result)


class ApartExperts(Experts):
    """Gate and values have a grouped matmul each."""

    def _computed(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: list[torch.Tensor],
        ends: torch.Tensor,
        masked: torch.Tensor,
    ) -> torch.Tensor:
        (up, down), inner = weights, SMALL.inner
        gate, values = (torch._grouped_mm(rows, w.contiguous(), offs=ends) for w in (up[..., :inner], up[..., inner:]))
        return torch._grouped_mm(F.silu(gate) * values, down, offs=ends)

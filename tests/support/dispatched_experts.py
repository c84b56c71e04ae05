# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``bench.support.experts.DispatchedExperts``, and the layer with a loop over its experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from tests.support.expert_layers import LOADS


class LoopedExperts(DispatchedExperts):
    """The layer with a loop over this rank's experts, as torchtitan's ``_run_experts_for_loop`` writes it: each
    expert's rows have their own matmuls. Each expert's number of rows is an unbacked symbol."""

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
    x = torch.randn(tokens, SMALL.hidden, generator=made).to(dtype)
    return x, LOADS[loads](tokens, made), torch.rand(tokens, SMALL.chosen, generator=made)

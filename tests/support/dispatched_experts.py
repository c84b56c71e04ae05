# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``bench.support.experts.DispatchedExperts``."""

from __future__ import annotations

import torch

from bench.support.experts import SMALL
from tests.support.expert_layers import LOADS


def inputs(tokens: int, loads: str, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of ``rank``, their experts by ``expert_layers.LOADS``, and their scores."""
    made = torch.Generator().manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, SMALL.hidden, generator=made).to(dtype)
    return x, LOADS[loads](tokens, made), torch.rand(tokens, SMALL.chosen, generator=made)

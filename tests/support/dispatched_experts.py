# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``bench.support.experts.DispatchedExperts``, its errors against fp64, and the layer with a loop over its
experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from tests.support.expert_layers import LOADS

TOLERANCE = 8e-2
"""The experts compute in bf16, the only dtype in which ``torch.compile`` traces ``_grouped_mm``. A wrong row is off by
about 1."""


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


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1))


def errors_of(layer: DispatchedExperts, compiled: Any, rank: int, ranks: int, *given: Any) -> dict[str, float]:
    """The largest error of the output and of each gradient on this rank. An error is relative to the exact tensor's
    largest value, or to 1 if this value is smaller."""
    tokens, loads, dtype = given
    x, ids, scores = inputs(tokens + rank, loads, rank, dtype)
    layer.zero_grad()
    out = compiled(x.requires_grad_(), ids, scores.requires_grad_())
    out.float().sin().sum().backward()
    weights = [w.double().requires_grad_() for w in layer.all_weights]
    # A routed expert's gradient is the sum over the tokens of all ranks. The shared expert's gradient is the sum over
    # this rank's tokens.
    for other in sorted(range(ranks), key=lambda r: r == rank):
        other_x, other_ids, other_scores = inputs(tokens + other, loads, other, dtype)
        other_x, other_scores = other_x.double().requires_grad_(), other_scores.double().requires_grad_()
        for w in weights[3:]:
            w.grad = None
        exact = layer.whole(other_x, other_ids, other_scores, weights)
        exact.sin().sum().backward()
    pairs = {"output": (out, exact), "x": (x.grad, other_x.grad), "scores": (scores.grad, other_scores.grad)}
    own = [w.grad[layer.own] for w in weights[:3]] + [w.grad for w in weights[3:]]
    pairs |= {n: (p.grad, g) for (n, p), g in zip(layer.named_parameters(), own)}
    return {name: _off(found.detach(), wanted.detach()) for name, (found, wanted) in pairs.items()}

# SPDX-License-Identifier: Apache-2.0
"""Trains a block whose weights are sharded, as in a graph of SimpleFSDP. Each weight is gathered before its matmul. Its
gradient is reduce-scattered after the matmul that computes it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.structures import GatherTokens

WIDTH = 12


def _block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ up) @ down


def _sharded(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return _block(x, GatherTokens.apply(up), GatherTokens.apply(down))


def _tokens(rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _train(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, float]]:
    """``(number of overlapped sites by phase and pattern, errors)`` on this rank. A weight's gradient is the sum over
    the tokens of all ranks, computed in fp64."""
    compile_anew()
    generator = torch.Generator().manual_seed(99)
    whole = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    rows = WIDTH // world_size
    shards = [w[rank * rows : (rank + 1) * rows].float().requires_grad_() for w in whole]
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports)
    found = torch.compile(_sharded, backend=backend, fullgraph=True, dynamic=False)(_tokens(rank).float(), *shards)
    found.square().sum().backward()
    exact = [w.clone().requires_grad_() for w in whole]
    torch.stack([_block(_tokens(r), *exact).square().sum() for r in range(world_size)]).sum().backward()
    pairs = {"output": (found, _block(_tokens(rank), *whole))}
    for name, shard, weight in zip(("up", "down"), shards, exact, strict=True):
        pairs[name] = (shard.grad, weight.grad[rank * rows : (rank + 1) * rows])
    errors = {name: float((f.double() - e).abs().max() / e.abs().max()) for name, (f, e) in pairs.items()}
    overlapped = [(r.phase, s.facts.pattern) for r in reports for s in r.sites if s.decision.status == "overlapped"]
    return {f"{phase} {pattern}": n for (phase, pattern), n in Counter(overlapped).items()}, errors


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_are_gathered_and_gradients_scattered_under_their_matmuls(world_size: int) -> None:
    for sites, errors in run_ranks(world_size, _train):
        assert sites == {"forward all_gather_matmul": 2, "backward matmul_reduce_scatter": 2}
        assert max(errors.values()) < 1e-5, errors

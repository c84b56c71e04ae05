# SPDX-License-Identifier: Apache-2.0
"""Trains models whose weights are sharded in the graph, as by SimpleFSDP. Each weight is gathered before its matmul.
Its gradient is reduce-scattered after the matmul that computes it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.simple_fsdp import Model
from tests.support.simple_fsdp import TensorParallelMlp
from tests.support.simple_fsdp import data_parallel
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


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "sharded": (
        {},
        {"forward all_gather_matmul": 5, "backward matmul_reduce_scatter": 5},
        {"forward op_between": 1, "forward no_matmul": 3, "backward no_matmul": 4},
    ),
    "sharded, gathered again, in bf16": (
        {"dtype": torch.bfloat16, "reduced_in": torch.float32, "again": True},
        {"forward all_gather_matmul": 5, "backward all_gather_matmul": 5, "backward matmul_reduce_scatter": 5},
        {"forward op_between": 1, "forward no_matmul": 3, "backward no_matmul": 4 + 3},
    ),
    "replicated": (
        {"placements": [Replicate()]},
        {"backward matmul_all_reduce": 5},
        {"backward no_matmul": 4},
    ),
}
"""How a model's parameters are read; how many of its collectives are overlapped; how many are kept, and why. The
kept ones are those of the embedding and of three norms."""


def _ids(rank: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(rank))


def _train_model(rank: int, world_size: int, name: str) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """``(overlapped sites, near misses, errors)`` of a model that reads its parameters as ``SPELLINGS[name]`` says. The
    gradients of all ranks' tokens are summed in fp64."""
    compile_anew()
    torch.manual_seed(1)
    model = Model()
    exact = copy.deepcopy(model).double()
    data_parallel(model, init_device_mesh("cpu", (world_size,)), **SPELLINGS[name][0])
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring"), reports)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    found = compiled(_ids(rank))
    found.float().square().sum().backward()
    torch.stack([exact(_ids(r)).square().sum() for r in range(world_size)]).sum().backward()
    gradients = dict(exact.named_parameters())
    pairs = {"output": (found, exact(_ids(rank)))}
    pairs |= {n: (p.grad.full_tensor(), gradients[n].grad) for n, p in model.named_parameters()}
    errors = {n: float((f.double() - e).abs().max() / e.abs().max()) for n, (f, e) in pairs.items()}
    overlapped = Counter(
        f"{r.phase} {s.facts.pattern}" for r in reports for s in r.sites if s.decision.status == "overlapped"
    )
    kept = Counter(f"{r.phase} {m.reason.code}" for r in reports for m in r.near_misses)
    return dict(overlapped), dict(kept), errors


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in SPELLINGS), ("sharded", 4)])
def test_a_model_whose_parameters_are_gathered_at_each_read(name: str, world_size: int) -> None:
    """Every matmul hides the gather of its weight and the reduction of its gradient. Each other collective has a
    reason."""
    limit = 0.05 if "bf16" in name else 1e-5
    for overlapped, kept, errors in run_ranks(world_size, _train_model, name):
        assert overlapped == SPELLINGS[name][1] and kept == SPELLINGS[name][2]
        assert len(errors) == 10 and max(errors.values()) < limit, errors


def _train_on_a_mesh(rank: int, world_size: int) -> tuple[list[str], dict[str, float]]:
    """``("phase, group, pattern: status" of each site, errors)``. The ranks of a row of the mesh share their tokens."""
    compile_anew()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(99)
    exact = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    model = TensorParallelMlp(*(w.float() for w in exact), mesh)
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring", sequence_parallel="off"), reports)
    row = mesh.get_local_rank("dp")
    x = _tokens(row).float().requires_grad_()
    found = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    found.square().sum().backward()
    exact = [w.requires_grad_() for w in exact]
    tokens = [_tokens(r).requires_grad_() for r in range(2)]
    results = [torch.relu(t @ exact[0].T) @ exact[1].T for t in tokens]
    torch.stack([r.square().sum() for r in results]).sum().backward()
    pairs = {"output": (found, results[row]), "input": (x.grad, tokens[row].grad)}
    for parameter, weight, name in zip(model.parameters(), exact, ("up", "down"), strict=True):
        pairs[name] = (parameter.grad.full_tensor(), weight.grad)
    errors = {name: float((f.double() - e).abs().max() / e.abs().max()) for name, (f, e) in pairs.items()}
    sites = [
        f"{r.phase}, {s.facts.collective.mesh_dim}, {s.facts.pattern}: {s.decision.status}"
        for r in reports
        for s in r.sites
    ]
    assert not any(r.near_misses for r in reports)
    return sorted(sites), errors


MESH_SITES = [
    "backward, dp, matmul_reduce_scatter: overlapped",
    "backward, dp, matmul_reduce_scatter: overlapped",
    "backward, tp, matmul_all_reduce: overlapped",
    "forward, dp, all_gather_matmul: overlapped",
    "forward, dp, all_gather_matmul: overlapped",
    "forward, tp, matmul_all_reduce: refused",
]
"""The last site shares the matmul of the second layer with the gather of this layer's weight."""


def test_data_and_tensor_parallel_weights() -> None:
    for sites, errors in run_ranks(4, _train_on_a_mesh):
        assert sites == MESH_SITES
        assert max(errors.values()) < 1e-5, errors

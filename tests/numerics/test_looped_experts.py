# SPDX-License-Identifier: Apache-2.0
"""Loops over experts on gloo ranks. Each expert is computed for all tokens and has a factor for each token. The ring
cuts the factors with the rows of the matmuls. The results are compared with fp64, and with the program as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.support.experts import ExpertSizes
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.expert_layers import LOADS
from tests.support.expert_layers import LoopedExperts
from tests.support.expert_layers import gated
from tests.support.expert_layers import inputs
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""The limit of the relative error for each dtype of the tokens."""
COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: all_reduce(x, "sum", dist.group.WORLD),
    "avg": lambda x: all_reduce(x, "avg", dist.group.WORLD) * dist.get_world_size(),
    "scatter": lambda x: reduce_scatter(x, "sum", 0, dist.group.WORLD),
}


def _statuses(reports: list[OverlapReport]) -> list[tuple[str, int, str]]:
    """``(pattern, number of matmuls, status)`` of each site."""
    return [(s.facts.pattern, len(s.facts.matmuls), s.decision.status) for r in reports for s in r.sites]


def _every_load(
    rank: int, world_size: int, tokens: int, collective: str, dtype: torch.dtype, wide: bool
) -> tuple[list[tuple[str, int, str]], dict[str, float], list[str]]:
    """``(sites, {loads: relative error}, problems)``. ``wide``: whether the factors are fp32, so that they widen the
    experts' results."""
    compile_anew()
    experts = LoopedExperts(rank, world_size, sizes=ExpertSizes(experts=2 * world_size), reduce=COLLECTIVES[collective])
    reports: list[OverlapReport] = []
    compiled = torch.compile(experts, backend=interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports))
    errors = {}
    for loads in LOADS:
        x, ids, weights = inputs(tokens, loads)
        x, ids, weights = x.to(dtype), ids % (2 * world_size), weights.to(torch.float32 if wide else dtype)
        with torch.no_grad():
            found, exact = compiled(x, ids, weights), experts.whole(x.double(), ids, weights.double())
        if collective == "scatter":
            exact = exact.chunk(world_size)[rank]
        assert found.dtype == dtype and found.shape == exact.shape
        errors[loads] = float((found.double() - exact).abs().max() / exact.abs().max())
    return _statuses(reports), errors, [text for r in reports for text in (*waste(r), *r.notices)]


@pytest.mark.parametrize(
    ("world_size", "tokens", "collective", "dtype", "wide"),
    [
        (2, 13, "sum", torch.float32, True),
        (2, 13, "avg", torch.bfloat16, True),
        (3, 13, "sum", torch.bfloat16, False),
        (3, 2, "sum", torch.float32, True),
        (3, 12, "scatter", torch.bfloat16, True),
        pytest.param(2, 12, "scatter", torch.float32, True, marks=pytest.mark.thorough),
    ],
)
def test_blocks_of_tokens(world_size: int, tokens: int, collective: str, dtype: torch.dtype, wide: bool) -> None:
    """Each row must have the factor of its own token. The ranks may not divide the tokens, some experts have no tokens,
    and there may be fewer tokens than ranks."""
    pattern = "matmul_reduce_scatter" if collective == "scatter" else "matmul_all_reduce"
    for found, errors, problems in run_ranks(world_size, _every_load, tokens, collective, dtype, wide, timeout=300):
        assert found == [(pattern, 2, "overlapped")] and problems == []
        assert {loads: error for loads, error in errors.items() if not error < TOLERANCE[dtype]} == {}


def _of_integers(rank: int, world_size: int) -> tuple[list[tuple[str, int, str]], bool, torch.Tensor]:
    """``(sites, whether the results equal those of the program as written, result)``. In fp32, all sums of these
    numbers are exact."""
    compile_anew()
    made = torch.Generator().manual_seed(rank)

    def program(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return all_reduce(gated(x, shares, up, down, torch.relu), "sum", dist.group.WORLD)

    arguments = [
        torch.randint(-3, 4, shape, generator=made).float() for shape in [(11, 16), (11, 3), (3, 16, 8), (3, 8, 16)]
    ]
    arguments[1][:, 1] = 0
    reports: list[OverlapReport] = []
    compiled = torch.compile(program, backend=interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports))
    with torch.no_grad():
        exact, found = program(*arguments), compiled(*arguments)
    return _statuses(reports), torch.equal(exact, found), found


@pytest.mark.parametrize("world_size", [2, 3])
def test_integers_bit_for_bit(world_size: int) -> None:
    """If no sum is rounded, the results have the bits of the program as written, on all ranks."""
    results = run_ranks(world_size, _of_integers, timeout=300)
    for found, same, result in results:
        assert found == [("matmul_all_reduce", 3, "overlapped")] and same
        assert torch.equal(result, results[0][2]) and result.any()


def _generated(rank: int, world_size: int) -> tuple[list[tuple[str, int, str]], dict[int, float], int]:
    """``(sites, {tokens: relative error}, number of graphs)`` of generated code for any number of tokens."""
    compile_anew(kernels=False)
    experts = LoopedExperts(rank, world_size, sizes=ExpertSizes(experts=2 * world_size))
    options: dict[str, Any] = {"schedule": "ring", "sequence_parallel": "off"}
    compiled = torch.compile(experts, backend="overlap_inductor", options=options, fullgraph=True)
    errors = {}
    for tokens in (64, 18, 40):
        x, ids, weights = inputs(tokens)
        x, ids, weights = x.float(), ids % (2 * world_size), weights.float()
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            found, exact = compiled(x, ids, weights), experts.whole(x.double(), ids, weights.double())
        errors[tokens] = float((found.double() - exact).abs().max() / exact.abs().max())
    return _statuses(all_reports()), errors, len(all_reports())


def test_any_number_of_tokens() -> None:
    """The blocks of the factors must not keep the size of the first call. One graph serves all of these token counts:
    a shard of each has whole blocks of several rows, and no row is left over."""
    for found, errors, graphs in run_ranks(2, _generated, timeout=400):
        assert found == [("matmul_all_reduce", 2, "overlapped")] and graphs == 1
        assert {tokens: error for tokens, error in errors.items() if not error < 1e-5} == {}

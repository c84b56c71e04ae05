# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on gloo ranks: the gathers of keys and values run under the attention, and the output is
compared with fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.context_parallel import LAYERS
from tests.support.context_parallel import MASKS
from tests.support.context_parallel import all_queries
from tests.support.context_parallel import exact
from tests.support.context_parallel import heads_first
from tests.support.context_parallel import mask_of
from tests.support.context_parallel import tokens_first
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

PATTERN = "all_gather_attention"


class _Problem:
    """One rank's tensors, ``[batch, heads, tokens, width]``, and the output in fp64. All ranks must make the same
    problems, one after the other."""

    def __init__(
        self, rank: int, ranks: int, mask: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], layer: Any
    ) -> None:
        batch, heads, shared, own = sizes
        self.layer = layer
        torch.manual_seed(hash((ranks, *sizes)) % 1000)
        shapes = [(batch, heads, own, 8), *[(batch, heads // shared, own, 8)] * 2]
        every = [[torch.randn(shape).mul(3).to(dtype) for shape in shapes] for _ in range(ranks)]
        self.own = every[rank]
        torch.manual_seed(rank)
        rows = own * (ranks if layer is all_queries else 1)
        self.mask = mask_of(mask, 0 if layer is all_queries else rank, heads, rows, own * ranks)
        if isinstance(self.mask, torch.Tensor) and self.mask.is_floating_point():
            self.mask = self.mask.to(dtype)
        queries, keys, values = (torch.cat([parts[i] for parts in every], 2) for i in range(3))
        self.expected = exact(queries if layer is all_queries else self.own[0], keys, values, self.mask)

    def error(self, call: Any) -> float:
        turned = self.layer is tokens_first
        own = [x.transpose(1, 2).contiguous() for x in self.own] if turned else self.own
        with torch.no_grad():
            found = call(*own, self.mask)
        assert found.dtype is self.own[0].dtype
        found = found.transpose(1, 2) if turned else found
        return float((found.double() - self.expected).abs().max())


def _statuses(reports: list[OverlapReport]) -> list[tuple[str, str]]:
    """What became of the gathers. That of the queries is no part of the site."""
    found = [(s.facts.pattern, s.decision.status) for r in reports for s in r.sites]
    return found + [
        (m.reason.code, m.reason.text) for r in reports for m in r.near_misses if m.reason.code != "no_matmul"
    ]


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = ((2, 4, 2, 5), (1, 2, 1, 16), (1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 2, 16))
"""Batch, heads of the queries, how many of them share a head of the keys, own tokens."""


def _cases(world_size: int) -> list[tuple[str, Any, torch.dtype, tuple[int, int, int, int], str]]:
    """Each mask with two of the layers, and each dtype, each size and each direction with many of them."""
    found = []
    for i, (mask, second) in enumerate(itertools.product(MASKS, (False, True))):
        layer = LAYERS[(i // 2 * 3 + second + world_size) % len(LAYERS)]
        direction = ("unidirectional", "bidirectional")[(i // 2 + second) % 2]
        found.append((mask, layer, DTYPES[i % 3], SIZES[(i + world_size) % len(SIZES)], direction))
    return found


def _compared(rank: int, world_size: int) -> list[str]:
    """The problems of this rank with the cases of ``_cases``."""
    problems = []
    for mask, layer, dtype, sizes, direction in _cases(world_size):
        problem = _Problem(rank, world_size, mask, dtype, sizes, layer)
        torch._dynamo.reset()
        reports: list[OverlapReport] = []
        config = OverlapConfig(schedule="ring", ring_direction=direction, sequence_parallel="off")
        backend = interpreted(config, reports)
        error = problem.error(torch.compile(layer, backend=backend, dynamic=False, fullgraph=True))
        plain = problem.error(layer)
        text = f"{layer.__name__} {mask} {dtype} {sizes} {direction}"
        if _statuses(reports) != [(PATTERN, "overlapped")]:
            problems.append(f"{text}: {_statuses(reports)}")
        # Each piece is rounded to the dtype once, then the merged output is.
        if not error <= 2 * plain + 8 * torch.finfo(dtype).eps:
            problems.append(f"{text}: error {error}, without overlap {plain}")
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_attention(world_size: int) -> None:
    """Catches a wrong merge, keys and mask columns of a wrong rank, and queries that see no key of a rank or of any."""
    assert run_ranks(world_size, _compared, timeout=500) == [[]] * world_size


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return heads_first(q, k * 1, v * 1, mask)


def _compiled(rank: int, world_size: int) -> list[str]:
    """The problems of this rank's generated code."""
    compile_anew()
    problems = []
    for mask, dtype in (("random", torch.float32), ("none", torch.bfloat16), ("is_causal", torch.float32)):
        torch._dynamo.reset()
        problem = _Problem(rank, world_size, mask, dtype, (2, 4, 2, 32), heads_first)
        plain = problem.error(heads_first)
        before = len(all_reports())
        with overlap_inductor.overlap(schedule="ring", sequence_parallel="off"):
            error = problem.error(torch.compile(_layer, dynamic=False))
        if _statuses(all_reports()[before:]) != [(PATTERN, "overlapped")]:
            problems.append(f"{mask}: {_statuses(all_reports()[before:])}")
        if not error <= 2 * plain + 8 * torch.finfo(dtype).eps:
            problems.append(f"{mask}: error {error}, without overlap {plain}")
    dist.barrier()
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_generated_code(world_size: int) -> None:
    """Catches a buffer that Inductor reuses too early, and a slice of the mask at a wrong offset."""
    assert run_ranks(world_size, _compiled) == [[]] * world_size

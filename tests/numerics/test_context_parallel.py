# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on gloo ranks: the gathers of keys and values run under the attention, and the output is
compared with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck
from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.context_parallel import MASKS
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

    def __init__(self, rank: int, ranks: int, mask: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
        batch, heads, shared, own = sizes
        torch.manual_seed(hash((ranks, *sizes)) % 1000)
        shapes = [(batch, heads, own, 8), *[(batch, heads // shared, own, 8)] * 2]
        every = [[torch.randn(shape).mul(3).to(dtype) for shape in shapes] for _ in range(ranks)]
        self.own = every[rank]
        torch.manual_seed(rank)
        self.mask = mask_of(mask, rank, heads, own, own * ranks)
        if self.mask is not None and self.mask.is_floating_point():
            self.mask = self.mask.to(dtype)
        keys, values = (torch.cat([parts[i] for parts in every], 2) for i in (1, 2))
        self.expected = exact(self.own[0], keys, values, self.mask)

    def error(self, call: Any, tokens_come_first: bool) -> float:
        own = [x.transpose(1, 2).contiguous() for x in self.own] if tokens_come_first else self.own
        with torch.no_grad():
            found = call(*own, self.mask)
        assert found.dtype is self.own[0].dtype
        found = found.transpose(1, 2) if tokens_come_first else found
        return float((found.double() - self.expected).abs().max())


def _statuses(reports: list[OverlapReport]) -> list[tuple[str, str]]:
    found = [(s.facts.pattern, s.decision.status) for r in reports for s in r.sites]
    return found + [(m.reason.code, m.reason.text) for r in reports for m in r.near_misses]


def _draws(rank: int, world_size: int, examples: int) -> tuple[int, list[str]]:
    """``(examples run, problems)`` of this rank. All ranks draw the same examples (see ``test_random_shapes``)."""
    problems: list[str] = []
    count = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        mask=st.sampled_from(MASKS),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        layer=st.sampled_from([heads_first, tokens_first]),
        batch=st.integers(1, 2),
        kept=st.integers(1, 2),
        shared=st.integers(1, 2),
        own=st.sampled_from([1, 2, 5, 16]),
        direction=st.sampled_from(["unidirectional", "bidirectional"]),
    )
    def check(
        mask: str, dtype: torch.dtype, layer: Any, batch: int, kept: int, shared: int, own: int, direction: str
    ) -> None:
        nonlocal count
        count += 1
        problem = _Problem(rank, world_size, mask, dtype, (batch, kept * shared, shared, own))
        errors = []
        for schedule in ("ring", "keep"):
            torch._dynamo.reset()
            reports: list[OverlapReport] = []
            config = OverlapConfig(schedule=schedule, ring_direction=direction, sequence_parallel="off")
            call = torch.compile(layer, backend=interpreted(config, reports), dynamic=False, fullgraph=True)
            errors.append(problem.error(call, layer is tokens_first))
            expected = [(PATTERN, "overlapped" if schedule == "ring" else "kept")]
            if _statuses(reports) != expected:
                problems.append(f"{layer.__name__} {mask} {dtype}: {_statuses(reports)}")
        # Each piece is rounded to the dtype once, then the merged output is.
        most = 2 * errors[1] + 8 * torch.finfo(dtype).eps
        if not errors[0] <= most:
            text = f"{layer.__name__} {mask} {dtype} {batch} {kept} {shared} {own} {direction}"
            problems.append(f"{text}: error {errors[0]}, without overlap {errors[1]}")

    check()
    return count, problems


@pytest.mark.parametrize(("world_size", "examples"), [(2, 40), (3, 25)])
def test_random_attention(world_size: int, examples: int) -> None:
    """Catches a wrong merge, keys and mask columns of a wrong rank, and queries that see no key of a rank or of any."""
    for rank, (count, problems) in enumerate(run_ranks(world_size, _draws, examples, timeout=500)):
        assert count >= examples // 2 and not problems, f"rank {rank}: {problems}"


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return heads_first(q, k * 1, v * 1, mask)


def _compiled(rank: int, world_size: int) -> list[str]:
    """The problems of this rank's generated code."""
    compile_anew()
    problems = []
    for mask, dtype in (("random", torch.float32), ("none", torch.bfloat16)):
        torch._dynamo.reset()
        problem = _Problem(rank, world_size, mask, dtype, (2, 4, 2, 32))
        plain = problem.error(heads_first, False)
        before = len(all_reports())
        with overlap_inductor.overlap(schedule="ring", sequence_parallel="off"):
            error = problem.error(torch.compile(_layer, dynamic=False), False)
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

# SPDX-License-Identifier: Apache-2.0
"""Compiles small functions with schedules ``fused`` and ``chunked``. The graphs run on several processes, with kernels
in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.fused_cases import cases
from tests.support.fused_cases import contractions
from tests.support.fused_cases import exchanges
from tests.support.fused_cases import sums
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.ring_cases import as_tuple
from tests.support.shared_memory import use_shared_memory

CALLS = 2


def _check(rank: int, world_size: int, folder: str, names: list[str] | None, schedule: str = "fused") -> list[str]:
    """Run the cases in ``names``, or all of ``fused_cases.cases``. Returns the problems on this rank."""
    use_shared_memory(folder)
    problems = []
    config = OverlapConfig(schedule=schedule, mode="strict")
    known = cases(world_size) | exchanges(world_size) | contractions(world_size) | sums(world_size)
    for name in names or cases(world_size):
        torch._dynamo.reset()
        function, shapes, expected = known[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(function, backend=interpreted(config, reports), dynamic=False)
        for call in range(CALLS):
            generator = torch.Generator().manual_seed(7 + rank + 100 * call)
            inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).half() for shape in shapes]
            exact = as_tuple(function(*(i.double() for i in inputs)))
            found = as_tuple(compiled(*inputs))
            for e, f in zip(exact, found, strict=True):
                if (
                    f.dtype != torch.float16
                    or f.shape != e.shape
                    or not torch.allclose(f.double(), e, rtol=2e-2, atol=5e-2)
                ):
                    problems.append(f"{name} call {call}: {tuple(f.shape)} off by {(f.double() - e).abs().max():.3g}")
        schedules = [p.schedule for r in reports for s in r.sites for p in s.decision.plan]
        if schedules != [schedule] * expected:
            problems.append(f"{name}: {schedules}, {[s.decision.reasons for r in reports for s in r.sites]}")
    return problems


def _check_token_counts(rank: int, world_size: int, folder: str) -> list[str]:
    use_shared_memory(folder)
    problems = []
    for name in ("gather rows", "scatter rows", "all-reduce"):
        torch._dynamo.reset()
        function, (left, right), _ = cases(world_size)[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(
            function, backend=interpreted(OverlapConfig(schedule="fused", mode="strict", max_tokens=100), reports)
        )
        b = torch.randn(right, generator=torch.Generator().manual_seed(rank)).half()
        # 7 rows and 1 row are less than a tile. 60 rows of each rank are more than 100 tokens, so they run without
        # overlap.
        for rows in (24, 7, 1, 0, 60):
            rows *= 1 if name == "gather rows" else world_size
            rows += name == "all-reduce" and rows > 0
            a = torch.randn(rows, left[1], generator=torch.Generator().manual_seed(7 * rank + rows)).half()
            torch._dynamo.mark_dynamic(a, 0) if rows > 1 else torch._dynamo.maybe_mark_dynamic(a, 0)
            exact, found = function(a.double(), b.double()), compiled(a, b)
            if found.shape != exact.shape or not torch.allclose(found.double(), exact, rtol=2e-2, atol=5e-2):
                problems.append(
                    f"{name} of {rows} rows: {tuple(found.shape)} off by"
                    f" {(found.double() - exact).abs().max() if found.shape == exact.shape else '?'}"
                )
        plans = [s.decision.moving for r in reports for s in r.sites]
        if (
            not any("max_tokens" in p.parameters for p in plans)
            or any(p.schedule != "fused" for p in plans)
            or len(plans) > 3
        ):
            problems.append(f"{name}: {plans}")
    return problems


def test_a_token_count_that_changes(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_token_counts, str(tmp_path), timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_every_case_agrees_with_fp64(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), None, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.thorough
def test_three_ranks(tmp_path: Path) -> None:
    names = [
        "gather rows, two matmuls, one with bias, gathered tensor read",
        "gather an uneven sequence, batch 2",
        "scatter uneven rows",
        "all-reduce",
    ]
    for rank, problems in enumerate(run_ranks(3, _check, str(tmp_path), names, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_schedule_chunked(tmp_path: Path) -> None:
    """Gathers, reduce-scatters and all-reduces in different layouts."""
    names = [
        "gather rows, two matmuls, one with bias, gathered tensor read",
        "gather rows, and a weight's gradient",
        "gather sequence, batch 2, and a weight's gradient",
        "gather sequence, batch 2",
        "gather an uneven sequence, batch 2",
        "scatter uneven rows",
        "scatter the last dim",
        "all-reduce of rows whose number W does not divide",
        "an MLP, gathered and scattered",
    ]
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), names, "chunked", timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [
        ("chunked", 2),
        ("fused", 3),
        *(pytest.param(*p, marks=pytest.mark.thorough) for p in (("chunked", 3), ("fused", 2))),
    ],
)
def test_exchanges(tmp_path: Path, schedule: str, world_size: int) -> None:
    """All-to-alls of rows and of columns, before and after a matmul, with and without a permute."""
    names = list(exchanges(world_size))
    for rank, problems in enumerate(run_ranks(world_size, _check, str(tmp_path), names, schedule, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [("chunked", 2), ("fused", 2), *(pytest.param(s, 3, marks=pytest.mark.thorough) for s in ("chunked", "fused"))],
)
def test_exchanges_of_a_contracted_dim(tmp_path: Path, schedule: str, world_size: int) -> None:
    """Each slice must be multiplied once, by the rows of the right operand that belong to it."""
    names = list(contractions(world_size))
    for rank, problems in enumerate(run_ranks(world_size, _check, str(tmp_path), names, schedule, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_chunks_of_a_sum_of_matmuls(tmp_path: Path, world_size: int) -> None:
    """If several layers read the same tensor, its gradient is a sum of matmuls. Each product of a chunk must be
    computed from this chunk's rows, and added once."""
    names = list(sums(world_size))
    tried = names if world_size == 2 else [names[1], names[3], names[6]]
    for rank, problems in enumerate(run_ranks(world_size, _check, str(tmp_path), tried, "chunked", timeout=400)):
        assert not problems, f"rank {rank}: {problems}"

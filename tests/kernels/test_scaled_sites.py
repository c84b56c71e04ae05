# SPDX-License-Identifier: Apache-2.0
"""Compiles small functions with fp8 sites (``_scaled_mm``) and schedule ``chunked``. The graphs run on several
processes. Their results are compared with those of fp64 matmuls of the dequantised operands."""

from __future__ import annotations

from pathlib import Path

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.ring_cases import as_tuple
from tests.support.scaled_sites import cases
from tests.support.scaled_sites import made
from tests.support.shared_memory import use_shared_memory

CALLS = 2


def off(found: torch.Tensor, exact: torch.Tensor) -> str | None:
    """The problem of ``found``: a wrong shape, or an error above 3 % of the largest element. ``None`` if there is
    none."""
    if found.shape != exact.shape:
        return f"has shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
    error = (found.double() - exact).abs().max()
    return (
        f"off by {error:.3g}; the largest element is {exact.abs().max():.3g}"
        if not error <= 3e-2 * exact.abs().max()
        else None
    )


def _check(rank: int, world_size: int, folder: str, names: list[str] | None) -> list[str]:
    """Run the cases in ``names``, or all of ``scaled_sites.cases``. Returns the problems on this rank."""
    use_shared_memory(folder)
    problems = []
    for name in names or cases(world_size):
        torch._dynamo.reset()
        function, inputs, expected = cases(world_size)[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(
            function, backend=interpreted(OverlapConfig(schedule="chunked", mode="strict"), reports), dynamic=False
        )
        for call in range(CALLS):
            tensors = made(inputs, torch.Generator().manual_seed(7 + rank + 100 * call))
            exact = as_tuple(function(*(t.double() for t in tensors)))
            for e, f in zip(exact, as_tuple(compiled(*tensors)), strict=True):
                if problem := off(f, e):
                    problems.append(f"{name} call {call}: {problem}")
        schedules = [p.schedule for r in reports for s in r.sites for p in s.decision.plan]
        if schedules != ["chunked"] * expected:
            problems.append(f"{name}: {schedules}, {[s.decision.reasons for r in reports for s in r.sites]}")
    return problems


def _check_token_counts(rank: int, world_size: int, folder: str) -> list[str]:
    """Run four cases, each compiled once, with several token counts. Returns the problems on this rank."""
    use_shared_memory(folder)
    problems = []
    for name in (
        "gather rows, tensor-wise",
        "gather rows and scales, row-wise",
        "all-reduce, tensor-wise",
        "scatter rows, row-wise",
    ):
        torch._dynamo.reset()
        function, inputs, _ = cases(world_size)[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(
            function, backend=interpreted(OverlapConfig(schedule="chunked", mode="strict", max_tokens=100), reports)
        )
        tokens = inputs[0][1][0]
        # With the first three counts, a shard has fewer rows than ``ChunkedParameters.grain``, so it is not cut. The
        # last count is above ``max_tokens`` and runs without overlap.
        for rows in (24, 7, 2, 60):
            rows *= 1 if name.startswith("gather") else world_size
            now = [
                (kind, (rows, *shape[1:]) if shape[:1] == (tokens,) and (i == 0 or kind == "scale") else shape)
                for i, (kind, shape) in enumerate(inputs)
            ]
            tensors = made(now, torch.Generator().manual_seed(7 * rank + rows))
            for tensor, (_, shape) in zip(tensors, now, strict=True):
                if shape[:1] == (rows,) and (tensor is tensors[0] or shape[1:] == (1,)):
                    torch._dynamo.mark_dynamic(tensor, 0)
            (exact,), (found,) = as_tuple(function(*(t.double() for t in tensors))), as_tuple(compiled(*tensors))
            if problem := off(found, exact):
                problems.append(f"{name}, {rows} rows: {problem}")
        plans = [s.decision.moving for r in reports for s in r.sites]
        if [p.schedule for p in plans] != ["chunked"] or plans[0].parameters.get("max_tokens") != 100:
            problems.append(f"{name}: {plans}")
    return problems


def test_every_case_agrees_with_fp64_on_two_ranks(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), None, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_uneven_and_batched_cases_agree_with_fp64_on_three_ranks(tmp_path: Path) -> None:
    names = [
        "gather sequence, batch 2, row-wise",
        "scatter sequence, batch 2, row-wise",
        "all-reduce of rows whose number W does not divide, row-wise",
    ]
    for rank, problems in enumerate(run_ranks(3, _check, str(tmp_path), names, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_one_compiled_graph_serves_several_token_counts(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_token_counts, str(tmp_path), timeout=400)):
        assert not problems, f"rank {rank}: {problems}"

# SPDX-License-Identifier: Apache-2.0
"""The work of each rank in tests of random programs: compile the programs with overlap, and compare their results with
those of the uncompiled programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.interpreted import interpreted
from tests.support.random_programs import Program
from tests.support.random_programs import outcome
from tests.support.uneven_programs import UnevenProgram


def check(
    rank: int, world_size: int, kind: type[Program], seeds: list[int], fields: dict[str, Any], trains: bool
) -> tuple[list[str], dict[str, int]]:
    """Run programs of ``kind`` in fp64, where rounding cannot hide a wrong element. Returns the problems on this rank
    and the number of overlapped sites by pattern."""
    compile_anew()
    problems, overlapped = [], Counter[str]()
    for seed in seeds:
        reports: list[OverlapReport] = []
        backend = interpreted(OverlapConfig(schedule="ring", **fields), reports)
        problems += problems_of(kind(seed, world_size, trains=trains), rank, backend)
        problems += [f"program {seed}: {report.notices}" for report in reports if report.notices]
        overlapped.update(overlapped_in(reports))
    return problems, dict(overlapped)


def overlapped_in(reports: list[OverlapReport]) -> Counter[str]:
    return Counter(s.facts.pattern for r in reports for s in r.sites if s.decision.status == "overlapped")


def problems_of(program: Program, rank: int, backend: Any) -> list[str]:
    """The results of the compiled program that differ from those of the uncompiled program."""
    torch._dynamo.reset()
    function, name, problems = program.function(), f"program {program.seed}", []
    generator = torch.Generator().manual_seed(100 * program.seed + rank)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in program.inputs]
    exact = outcome(function, inputs, program.trains)
    found = outcome(torch.compile(function, backend=backend, dynamic=False), inputs, program.trains)
    for i, (e, f) in enumerate(zip(exact, found, strict=True)):
        assert e.isfinite().all(), f"{name} has results that are not finite: {program.text}"
        if e.shape != f.shape or e.numel() and not (e - f).abs().max() <= 1e-9 * max(1, e.abs().max()):
            problems.append(
                f"{name}, result {i}: shape {tuple(f.shape)}, expected {tuple(e.shape)}; largest difference"
                f" {(e - f).abs().max() if e.shape == f.shape else 'unknown'}\n{program.text}"
            )
    return problems


def check_uneven(
    rank: int, world_size: int, seeds: list[int], fields: dict[str, Any], trains: bool
) -> tuple[list[str], dict[str, int], int, int]:
    """Run uneven programs. Returns:

    - the problems on this rank;
    - the number of overlapped sites by pattern;
    - the number of programs that ran without overlap because ranks differed;
    - the number of programs whose text or shapes of inputs differ between ranks.
    """
    compile_anew()
    problems, overlapped, fell_back, differ = [], Counter[str](), 0, 0
    for seed in seeds:
        torch._dynamo.utils.counters.clear()
        program = UnevenProgram(seed, world_size, trains=trains, rank=rank)
        differ += (
            len(
                {
                    f"{p.inputs} {p.text}"
                    for p in (UnevenProgram(seed, world_size, trains=trains, rank=r) for r in range(world_size))
                }
            )
            > 1
        )
        reports: list[OverlapReport] = []
        problems += problems_of(
            program,
            rank,
            interpreted(OverlapConfig(schedule="ring", agreement_timeout=60, **fields), reports, compared=True),
        )
        if torch._dynamo.utils.counters["overlap_inductor"]["reason.ranks_differ"]:
            fell_back += 1
        else:
            overlapped.update(overlapped_in(reports))
            problems += [f"program {seed}: {report.notices}\n{program.text}" for report in reports if report.notices]
    return problems, dict(overlapped), fell_back, differ

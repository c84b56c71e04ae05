"""Programs whose ranks differ in bias, K and padding compute what they computed; hundreds of them by
``tools/sweep_models.py --part programs``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.numerics.interpreted import interpreted
from tests.numerics.ranks import compile_anew
from tests.numerics.ranks import run_ranks
from tests.numerics.test_random_programs import overlapped_in
from tests.numerics.test_random_programs import problems_of
from tests.numerics.uneven_programs import UnevenProgram

COUNT = 12


def check(
    rank: int, world_size: int, seeds: list[int], fields: dict[str, Any], trains: bool
) -> tuple[list[str], dict[str, int], int, int]:
    """What is wrong on this rank; sites run overlapped, by pattern; programs that ran without overlap since ranks
    differed; programs that are not the same on all ranks."""
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


@pytest.mark.parametrize(
    ("world_size", "fields", "trains"),
    [(2, {}, True), (3, {"step_node_budget": 1}, False)],
    ids=["2 ranks, trained", "3 ranks, looping"],
)
def test_a_program_of_which_ranks_differ(world_size: int, fields: dict[str, Any], trains: bool) -> None:
    results = run_ranks(world_size, check, list(range(COUNT)), fields, trains, timeout=500)
    for rank, (problems, overlapped, fell_back, differ) in enumerate(results):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
        assert differ >= COUNT // 2, "too few programs differ to say anything"
        assert sum(overlapped.values()) >= COUNT // 2, (
            f"too few sites to say anything: {overlapped}, {fell_back} programs fell back"
        )

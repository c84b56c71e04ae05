"""Whatever the program: it compiles, its rewrites do not fail, and it computes what it computed.

python -m tests.numerics.test_random_programs --world-size 2 --seeds 1000 2000 [--fields '{"step_node_budget": 1}']
[--trains]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.numerics.interpreted import interpreted
from tests.numerics.random_programs import Program
from tests.numerics.random_programs import outcome
from tests.numerics.ranks import compile_anew
from tests.numerics.ranks import run_ranks

COUNT = 25
"""Programs of a case here; thousands by ``python -m tests.numerics.test_random_programs``, for whoever changes what
finds or rewrites sites."""


def check(
    rank: int, world_size: int, seeds: list[int], fields: dict[str, Any], trains: bool
) -> tuple[list[str], dict[str, int]]:
    """What is wrong on this rank (fp64, so that a wrong element shows), and sites overlapped by pattern."""
    compile_anew()
    problems, overlapped = [], Counter[str]()
    for seed in seeds:
        reports: list[OverlapReport] = []
        backend = interpreted(OverlapConfig(schedule="ring", **fields), reports)
        problems += problems_of(Program(seed, world_size, trains=trains), rank, backend)
        problems += [f"program {seed}: {report.notices}" for report in reports if report.notices]
        overlapped.update(overlapped_in(reports))
    return problems, dict(overlapped)


def overlapped_in(reports: list[OverlapReport]) -> Counter[str]:
    return Counter(s.facts.pattern for r in reports for s in r.sites if s.decision.status == "overlapped")


def problems_of(program: Program, rank: int, backend: Any) -> list[str]:
    """Where the program as ``backend`` compiles it differs from the program."""
    torch._dynamo.reset()
    function, name, problems = program.function(), f"program {program.seed}", []
    generator = torch.Generator().manual_seed(100 * program.seed + rank)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in program.inputs]
    exact = outcome(function, inputs, program.trains)
    found = outcome(torch.compile(function, backend=backend, dynamic=False), inputs, program.trains)
    for i, (e, f) in enumerate(zip(exact, found, strict=True)):
        assert e.isfinite().all(), f"{name} says nothing: {program.text}"
        if e.shape != f.shape or e.numel() and not (e - f).abs().max() <= 1e-9 * max(1, e.abs().max()):
            problems.append(
                f"{name}, result {i}: {tuple(f.shape)} beside {tuple(e.shape)}, off by"
                f" {(e - f).abs().max() if e.shape == f.shape else '?'}\n{program.text}"
            )
    return problems


@pytest.mark.parametrize(
    ("world_size", "fields", "trains"),
    [
        (2, {}, False),
        (2, {"step_node_budget": 1}, True),
        (3, {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2}, False),
    ],
    ids=["2 ranks", "2 ranks, looping, trained", "3 ranks, hop rounding, bidirectional"],
)
def test_a_program_computes_what_it_computed(world_size: int, fields: dict[str, Any], trains: bool) -> None:
    for rank, (problems, overlapped) in enumerate(
        run_ranks(world_size, check, list(range(COUNT)), fields, trains, timeout=500)
    ):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
        assert sum(overlapped.values()) >= COUNT // 2, f"too few sites to say anything: {overlapped}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END"))
    parser.add_argument("--fields", type=json.loads, default={}, help="of the configuration, JSON")
    parser.add_argument("--trains", action="store_true", help="gradients, too")
    arguments = parser.parse_args()
    (problems, overlapped), *_ = run_ranks(
        arguments.world_size, check, list(range(*arguments.seeds)), arguments.fields, arguments.trains, timeout=7200
    )
    print(*problems, f"{len(problems)} problems; sites overlapped: {overlapped}", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A pattern and a schedule from outside the package run on gloo ranks, in a compiled function and in the bench."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import overlap_inductor
from bench.operators import parsed
from bench.operators import run
from tests.support import toy_all_to_all as toy
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks


def _error(rank: int, world_size: int) -> tuple[str, float]:
    """Run a compiled layer. Returns the schedule that ran, and the largest error against fp64."""
    compile_anew(kernels=False)
    with toy.registered():
        torch.manual_seed(rank)
        x, w = torch.randn(6 * world_size, 8), torch.randn(8, 12)

        def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.relu(funcol.all_to_all_single((x @ w).cumsum(1), None, None, dist.group.WORLD))

        found = torch.compile(layer, backend="overlap_inductor")(x, w)
        report = overlap_inductor.last_report()
        assert report is not None
        exact = torch.empty(6 * world_size, 12, dtype=torch.float64)
        dist.all_to_all_single(exact, (x.double() @ w.double()).cumsum(1))
        return report.sites[0].decision.moving.schedule, float((found - torch.relu(exact)).abs().max())


def test_an_outside_schedule_computes_its_pattern() -> None:
    for schedule, error in run_ranks(3, _error):
        assert schedule == toy.SCHEDULE and error < 1e-5


def _rows(rank: int, world_size: int, out: str) -> list[tuple[str, bool]]:
    compile_anew(kernels=False)
    with toy.registered():
        arguments = parsed(
            ["--device", "cpu", "--shapes", "tiny", "--tokens", "16", "--patterns", toy.PATTERN]
            + ["--schedules", toy.SCHEDULE, "--dtype", "float32", "--settings", "compiled", "--out", out]
        )
        return [(row["provider"], row["error"] < 1e-4) for row in run(arguments, torch.device("cpu"), 0.0)]


def test_the_bench_checks_and_times_an_outside_schedule(tmp_path: Path) -> None:
    for rows in run_ranks(2, _rows, str(tmp_path / "rows.jsonl")):
        assert ("pairs/p2p", True) in rows and ("keep", True) in rows

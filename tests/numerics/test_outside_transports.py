# SPDX-License-Identifier: Apache-2.0
"""On gloo ranks, schedule ``ring`` sends its messages with a transport from outside the package. Reports and the bench
name this transport."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.operators import parsed
from bench.operators import run
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support import toy_transports as toy
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks


def _layer(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    hidden = torch.relu(all_gather(x, 0, group) @ a)
    return reduce_scatter(hidden @ b, "sum", 0, group), all_reduce(hidden @ b.sin(), "sum", group)


def _check(rank: int, world_size: int, folder: str) -> list[str]:
    compile_anew(kernels=False)
    problems = []
    torch.manual_seed(rank)
    inputs = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12, 16)
    exact = _layer(*(i.double() for i in inputs))
    with toy.registered(toy.Pigeons()) as pigeons:
        # With a budget of 3000 nodes, the steps are unrolled. With a budget of 1, each site becomes one looping op.
        for budget in (3000, 1):
            torch._dynamo.reset()
            pigeons.carried = 0
            dump = f"{folder}/{budget}"
            options: dict[str, Any] = {"schedule": "ring", "transport": "pigeons", "mode": "strict", "dump": dump}
            compiled = torch.compile(
                _layer, backend="overlap_inductor", options={**options, "step_node_budget": budget}
            )
            found = compiled(*inputs)
            errors = [float((f - e).abs().max()) for f, e in zip(found, exact, strict=True)]
            if not all(error <= 1e-4 for error in errors):
                problems.append(f"budget {budget}: off by {errors}")
            if not pigeons.carried:
                problems.append(f"budget {budget}: nothing was carried")
            report = overlap_inductor.last_report()
            assert report is not None
            planned = {(p.schedule, p.transport) for s in report.sites for p in s.decision.plan}
            if planned != {("ring", "pigeons")} or len(report.sites) != 3:
                problems.append(f"budget {budget}: planned as {planned} at {len(report.sites)} sites")
            (place,) = Path(dump).glob(f"rank_{rank}/*")
            sites = json.loads((place / "sites.json").read_text())["sites"]
            if [s["decision"]["plan"][0]["transport"] for s in sites] != ["pigeons"] * 3:
                problems.append(f"budget {budget}: sites.json names {sites}")
            named = {"report.txt": "ring/pigeons", "index.html": "ring/pigeons", "graph.after.txt": "'pigeons'"}
            for file, text in named.items():
                if text not in (place / file).read_text().replace('"', "'"):
                    problems.append(f"budget {budget}: {file} does not contain {text}")
    return problems


def test_the_ring_sends_by_an_outside_transport_and_reports_it(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path))):
        assert not problems, f"rank {rank}: {problems}"


def _rows(rank: int, world_size: int, out: str) -> list[tuple[str, bool]]:
    compile_anew(kernels=False)
    with toy.registered(toy.Pigeons()):
        arguments = parsed(
            ["--device", "cpu", "--shapes", "tiny", "--tokens", "16", "--patterns", "all_gather_matmul"]
            + ["--schedules", "ring/pigeons", "--dtype", "float32", "--settings", "compiled", "--out", out]
        )
        return [(row["provider"], row["error"] < 1e-4) for row in run(arguments, torch.device("cpu"), 0.0)]


def test_the_bench_checks_and_times_an_outside_transport(tmp_path: Path) -> None:
    for rows in run_ranks(2, _rows, str(tmp_path / "rows.jsonl")):
        assert ("ring/pigeons", True) in rows and ("keep", True) in rows

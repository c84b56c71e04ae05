# SPDX-License-Identifier: Apache-2.0
"""Layers of experts whose last grouped matmul is computed in parts of the columns: the plans of all ranks, the order
in the generated code, the choice of ``auto``, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.support.experts import SMALL
from bench.support.experts import Experts
from overlap_inductor.lowerings.column_parts import schedule
from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import facts
from tests.support.expert_layers import inputs
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.generated_code import lines_of

PARTS = {"schedule": "column_parts"}
STEPS = {"extern_kernels._grouped_mm(": "matmul", "all_reduce_.default(": "start", "wait_tensor.default(": "wait"}
SLOW_LINK = {"link_bytes": 6.25e7, "step_seconds": 3e-6, "collective_seconds": 3e-6, "matmul_flops": {"2": 2e9}}


def _report(rank: int = 0, tokens: int = 32, dynamic: bool = False, **fields: object) -> OverlapReport:
    arguments = inputs(tokens)
    with fake_group(2, rank), torch.no_grad():
        return report_of(Experts(rank, 2), *arguments, dynamic=dynamic, **fields)


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_ranks_compare_the_parts(dynamic: bool) -> None:
    plans = []
    for rank in (0, 1):
        report = _report(rank, dynamic=dynamic, **PARTS)
        assert facts(report) == [("matmul_all_reduce", ["grouped_mm M", "grouped_mm M"], "overlapped")]
        plans.append(json.loads(report.exchange)["steps"])
    tokens = "d0" if dynamic else 32
    assert (
        plans[0]
        == plans[1]
        == [
            f"g0: all_reduce(sum) bfloat16 [{tokens}, 16] in matmul_all_reduce by column_parts (parts=2)",
            "g0: all_reduce bfloat16 kept",
            "g0: kept collectives in the graph's order",
        ]
    )


@pytest.mark.usefixtures("alone")
def test_each_part_is_reduced_while_the_next_one_is_multiplied() -> None:
    """The combination of each part is a kernel of its own, between its matmul and its reduction."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        experts = Experts(3, 8, sizes=replace(SMALL, hidden=32))
        return experts(x.bfloat16(), (x[:, :2].abs() * 100).long() % 8, x[:, 2:4].bfloat16())

    lines = lines_of(layer, (64, 32), **PARTS)
    found = [step for line in lines for mark, step in STEPS.items() if mark in line and not line.startswith("#")]
    count = found.count("start")
    assert count in schedule.PARTS
    assert found == ["matmul", *["matmul", "start"] * count, *["wait"] * count]


def test_auto_takes_parts_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow link, parts are estimated to pay. On GPUs, ``auto`` takes them unless another schedule is faster, and
    leaves few tokens as written. On a CPU, ``auto`` does not consider them."""
    slow = json.dumps({**SLOW_LINK, "memory_bytes": 1e10})
    (site,) = _report(tokens=256, schedule="auto", machine=slow).sites
    assert "column_parts" not in site.decision.moving.estimate_us
    monkeypatch.setattr(schedule, "on_gpu", lambda device: True)
    decisions = [_report(tokens=n, schedule="auto", machine=slow).sites[0].decision for n in (256, 2)]
    estimates = [d.plan[0].estimate_us for d in decisions]
    assert estimates[0]["column_parts"] * 1.05 < estimates[0]["keep"]
    assert [d.status for d in decisions] == ["overlapped", "kept"]
    # Steps of a ring that cost much more leave the parts as the best choice.
    dear = json.dumps({**SLOW_LINK, "memory_bytes": 1e10, "step_seconds": 2e-5})
    (site,) = _report(tokens=256, schedule="auto", machine=dear).sites
    assert site.decision.moving.schedule == "column_parts"


def _sum(rows: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(rows.view(-1, 2, rows.shape[-1]).sum(1), "sum", dist.group.WORLD)


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
REFUSED: dict[str, tuple[Layer, int, str]] = {
    "too few columns": (lambda x, w, e, at: _sum(torch._grouped_mm(x, w, offs=e)[at]), 8, "16-byte words"),
    "no experts": (
        lambda x, w, e, at: funcol.all_reduce(x @ w[0], "sum", dist.group.WORLD),
        16,
        "only the columns of experts' rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("two")
def test_what_is_refused(name: str) -> None:
    function, columns, text = REFUSED[name]
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(4, 16, columns).bfloat16()
    report = report_of(function, x, w, torch.tensor([8, 8, 20, 32]).int(), torch.arange(32).flip(0), **PARTS)
    (site,) = report.sites
    assert site.decision.status == "refused" and text in site.decision.reasons[0].text
    assert report.after == report.before

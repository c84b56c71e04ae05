# SPDX-License-Identifier: Apache-2.0
"""Epilogues beside other sites. Another site could take an epilogue's nodes, move its inputs, or read its result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.passes import overlap_pass
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes.host_time import HostLimit
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

BF16 = torch.bfloat16
ROWS, K, N = 24, 16, 40


pytestmark = pytest.mark.usefixtures("reachable")


def planned(report: OverlapReport) -> list[tuple[str, str, Any]]:
    return [
        (s.decision.status, p.schedule, p.parameters.get("epilogue", p.parameters.get("norm")))
        for s in report.sites
        for p in s.decision.plan
        if p.schedule != "keep"
    ]


def test_the_norm_of_a_small_message_is_not_the_epilogue_of_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of both sites could compute the sum ``added``. The all-reduce's kernel computes the sum and the norm.
    For the sum, this kernel reads the gather site's product. So the gather site's kernel runs first, and cannot add the
    all-reduce's result."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))

    def f(
        x: torch.Tensor, w: torch.Tensor, x2: torch.Tensor, v: torch.Tensor, v2: torch.Tensor, gain: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        group = torch.distributed.group.WORLD
        b = all_reduce(x @ w, "sum", group)
        y = all_gather(x2, 0, group)
        added = (y @ v) * 0.5 + b
        wide = added.float()
        return added, gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(BF16), y @ v2

    zeros = [
        torch.zeros(s, dtype=BF16)
        for s in ((1024, 2048), (2048, 4096), (256, 8192), (8192, 4096), (8192, 4096), (4096,))
    ]
    zeros[4].requires_grad_()
    with fake_group(4):
        # Without replays, the host launches each chunk. So at the gather, ``fused`` is estimated to be faster than
        # ``keep``, and ``chunked`` is not. With short host times, reason ``host_bound`` keeps no site.
        told = '{"launch_seconds": 1e-9, "call_seconds": 1e-9}'
        forward = reports_of(f, *zeros, schedule="auto", mode="on", replay="off", machine=told)[0]
    assert not forward.notices and planned(forward) == [
        ("overlapped", "small_message", True),
        ("overlapped", "fused", None),
    ]


def test_a_rewrite_adds_no_epilogue_that_was_not_planned(two: None) -> None:
    """The plan gives the second weight no epilogue, because the cast of ``s`` comes after the gather. The rewrite moves
    the cast before the gather, but must not add an epilogue."""

    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = all_gather(x, 0, torch.distributed.group.WORLD)
        return torch.relu(y @ a.t()), (y @ b.t()) * s.to(BF16)

    arguments = torch.randn(ROWS, K).to(BF16), torch.randn(N, K).to(BF16), torch.randn(N, K).to(BF16), torch.randn(N)
    assert planned(report_of(f, *arguments, schedule="fused", mode="strict")) == [
        ("overlapped", "fused", ["relu(x)", ""])
    ]


@pytest.mark.parametrize("kind", ["reduce", "scatter"])
def test_a_later_ring_reads_the_result_of_an_epilogue(kind: str, two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real, schedules = planner.plan, iter(["fused", "ring"])

    def plan(site: OverlapSite, config: OverlapConfig, host_bound: HostLimit | None) -> Decision:
        return real(site, dataclasses.replace(config, schedule=next(schedules)))

    monkeypatch.setattr(overlap_pass.planner, "plan", plan)
    graph = HandGraph()
    x, w, v = (
        graph.input(ROWS, K, dtype=BF16),
        graph.input(K, N, name="w", dtype=BF16),
        graph.input(N, N, name="v", dtype=BF16),
    )
    h = graph.call(aten.relu.default, graph.reduce(graph.mm(x, w)))
    report = graph.output(getattr(graph, kind)(graph.call(aten.add.Tensor, graph.mm(h, v), h))).run(
        schedule="auto", mode="on", sub_chunks=1
    )
    assert not report.notices and [p[:2] for p in planned(report)] == [("overlapped", "fused"), ("overlapped", "ring")]


def test_ranks_need_not_agree_on_an_epilogues_numbers() -> None:
    """A rank computes its epilogue on its own results, so the epilogue may differ between ranks."""
    hashes = []
    for rank in range(2):
        with fake_group(2, rank) as group:
            report = report_of(
                lambda x, a: (all_gather(x, 0, group) @ a.t()) * (1.0 / (2 + rank)),  # noqa: B023
                torch.randn(ROWS, K).to(BF16), torch.randn(N, K).to(BF16), schedule="fused", mode="strict",
            )  # fmt: skip
        assert planned(report)[0][2] == [f"mul(x, {1.0 / (2 + rank)})"]
        hashes.append(report.plan_hash)
    assert hashes[0] == hashes[1]

# SPDX-License-Identifier: Apache-2.0
"""On GPUs, ``schedule=auto`` overlaps a graph of several collectives only if the GPU needs at least twice as
long as the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def four_gpus(reachable: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(4):
        yield


def layers(tokens: int, number: int, **switches: str) -> OverlapReport:
    """Two matmuls and an all-reduce in each layer."""
    graph = HandGraph()
    x = graph.input(tokens, 8192, dtype=BF16)
    for i in range(number):
        up = graph.input(8192, 3584, name=f"up{i}", dtype=BF16)
        down = graph.input(3584, 8192, name=f"down{i}", dtype=BF16)
        x = graph.reduce(graph.mm(graph.mm(x, up), down))
    return graph.output(x).run(**{"schedule": "auto", **switches})


def codes(report: OverlapReport) -> list[str]:
    return [s.decision.reasons[0].code if s.decision.reasons else s.decision.moving.schedule for s in report.sites]


def test_few_tokens_are_host_bound() -> None:
    report = layers(1024, 2)
    assert codes(report) == ["host_bound"] * 2
    # The GPU: 4 matmuls of 77 us, and 2 all-reduces of 30 us + 2 * 3/4 * 16 MiB at 3e11 B/s.
    # The host: 4 * 40 + 2 * 130 us.
    text = report.sites[0].decision.reasons[0].text
    assert "need 536 us for the graph, and the host 420 us" in text and "4 matmuls, 2 collectives" in text


def test_many_tokens_are_not() -> None:
    assert set(codes(layers(4096, 2))) <= {"chunked", "fused"}


def test_a_single_collective_is_left_to_its_estimate() -> None:
    assert "host_bound" not in codes(layers(1024, 1))


def test_a_small_message_needs_no_time_of_the_gpu() -> None:
    """The op of a small message takes less host time than the matmul and the collective that it replaces."""
    assert codes(layers(16, 2)) == ["small_message"] * 2


def test_a_cuda_graph_is_one_launch() -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert set(codes(layers(1024, 2))) <= {"chunked", "fused"}


def test_a_forced_schedule_and_a_stated_host_time_are_obeyed() -> None:
    assert codes(layers(1024, 2, schedule="chunked")) == ["chunked"] * 2
    assert set(codes(layers(1024, 2, machine='{"launch_seconds": 1e-9, "call_seconds": 1e-9}'))) <= {"chunked", "fused"}

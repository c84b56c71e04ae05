# SPDX-License-Identifier: Apache-2.0
"""On GPUs, ``auto`` compares the times that the GPU and the host need for a graph with several collectives. If the GPU
does not need much longer than the host, the graph's sites stay as written. Small messages and CUDA graphs, for example,
are exceptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.machine import WITHOUT_PEERS
from overlap_inductor.facts.machine import Machine
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.passes import host_guard
from overlap_inductor.passes import host_time
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat.guards import surely
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def four_gpus(reachable: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(4):
        yield


def through(graph: HandGraph, x: fx.Node, number: int) -> fx.Node:
    """Add ``number`` layers to ``graph``, each with two matmuls and an all-reduce. Returns the last result."""
    for _ in range(number):
        up = graph.input(8192, 3584, name=f"up_{x.name}", dtype=BF16)
        down = graph.input(3584, 8192, name=f"down_{x.name}", dtype=BF16)
        x = graph.reduce(graph.mm(graph.mm(x, up), down))
    return x


def layers(tokens: int, number: int, dynamic: bool = False, **switches: str) -> OverlapReport:
    graph = HandGraph()
    x = through(graph, graph.input(tokens, 8192, dtype=BF16, dynamic=[0] if dynamic else []), number)
    return graph.output(x).run(**{"schedule": "auto", **switches})


def served(report: OverlapReport) -> list[tuple[str, int, int | None]]:
    """``(schedule, first and last token count)`` of each piece of the plan. All sites must have the same plan."""
    plans = [[(p.schedule, *p.tokens) for p in s.decision.plan] for s in report.sites]
    assert all(plan == plans[0] for plan in plans)
    return plans[0]


def codes(report: OverlapReport) -> list[str]:
    return [s.decision.reasons[0].code if s.decision.reasons else s.decision.moving.schedule for s in report.sites]


def test_few_tokens_are_host_bound() -> None:
    report = layers(1024, 2)
    assert codes(report) == ["host_bound"] * 2
    # The GPU: 4 matmuls of 77 us, and 2 all-reduces of 30 us + 2 * 3/4 * 16 MiB at 3e11 B/s.
    # The host: 4 * 40 + 2 * 130 us.
    text = report.sites[0].decision.reasons[0].text
    assert "need 536 us for the graph, and the host 420 us" in text and "4 matmuls or other ops, 2 collectives" in text


def test_many_tokens_are_not() -> None:
    assert set(codes(layers(4096, 2))) <= {"chunked", "fused"}


def test_the_gpu_needs_more_than_twice_as_long() -> None:
    """Sites are overlapped only if the GPU needs at least ``host_time.MARGIN`` (2.2) times as long as the host. The
    host needs 420 us. The GPU needs 893 us for 1792 tokens (2.13 times as long) and 1012 us for 2048 (2.41)."""
    assert codes(layers(1792, 2)) == ["host_bound"] * 2
    assert set(codes(layers(2048, 2))) <= {"chunked", "fused"}


def test_a_single_collective_is_left_to_its_estimate() -> None:
    assert "host_bound" not in codes(layers(1024, 1))


def test_a_small_message_needs_no_time_of_the_gpu() -> None:
    """One op of schedule ``small_message`` replaces a matmul and its collective. The host launches this op faster than
    those two."""
    assert codes(layers(16, 2)) == ["small_message"] * 2


def test_a_cuda_graph_is_one_launch() -> None:
    """The GPU needs 1012 us for 2048 tokens, and the host 1000 us for a replay."""
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert set(codes(layers(2048, 2))) <= {"chunked", "fused"}
        assert codes(layers(1024, 2)) == ["host_bound"] * 2
        # 16 tokens: 2 matmuls of 22 us and an all-reduce of 32 us in each layer.
        assert codes(layers(16, 2)) == ["host_bound"] * 2 and codes(layers(16, 1)) == ["host_bound"]
        assert codes(layers(16, 16)) == ["small_message"] * 16
        report = layers(16, 2, machine='{"graph_seconds": 1e-9}')
    assert codes(report) == ["small_message"] * 2


@pytest.mark.parametrize("example", [64, 1000, 1100, 2048, 3500, 8192])
def test_dynamic_tokens_are_overlapped_from_the_count_on_at_which_the_gpu_is_the_limit(example: int) -> None:
    """2048 is the first power of two at which the GPU needs 2.2 times as long as the host. The estimate of one site
    alone pays from fewer tokens on. There is no small message: with a dynamic count, its launches are not replayed."""
    plan = served(layers(example, 2, dynamic=True))
    assert plan[0] == ("keep", 0, 2047)
    schedule, first, _ = plan[1]
    assert schedule in ("chunked", "fused") and first == 2048
    alone = served(layers(example, 2, dynamic=True, machine='{"launch_seconds": 1e-9, "call_seconds": 1e-9}'))
    assert alone[0][0] == "small_message"
    assert next(first for name, first, _ in alone if name in ("chunked", "fused")) < 2048


@pytest.mark.parametrize(
    ("example", "guard", "expected"),
    [
        (64, "s < 2048", None),
        (1100, "s < 2048", None),
        (2047, "s < 2048", None),
        (2048, "s >= 2048", "overlapped"),
        (3500, "s >= 2048", "overlapped"),
    ],
)
def test_a_guard_divides_dynamic_tokens(example: int, guard: str, expected: str | None) -> None:
    """A graph for fewer than 2048 tokens has no overlap op. The guard holds for every count that the graph serves."""
    graph = HandGraph()
    x = graph.input(example, 8192, dtype=BF16, dynamic=[0])
    graph.output(through(graph, x, 2))
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
    tokens = x.meta["val"].shape[0]
    assert surely(tokens < 2048 if "<" in guard else tokens >= 2048) and len(graph.shapes.guards) == 1
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
    assert len(graph.shapes.guards) == 1
    report = graph.run(schedule="auto")
    if expected is None:
        assert codes(report) == ["host_bound"] * 2 and report.after == report.before
    else:
        assert [s.decision.status for s in report.sites] == [expected] * 2


def test_an_example_beyond_the_largest_number_of_tokens() -> None:
    """With 65536 tokens the host is not the limit, although it is with ``max_tokens``."""
    slow = '{"launch_seconds": 1e-3, "call_seconds": 1e-3}'
    graph = HandGraph()
    x = graph.input(65536, 8192, dtype=BF16, dynamic=[0])
    graph.output(through(graph, x, 2))
    (limit, _) = host_time.limits(graph.found(), OverlapConfig(schedule="auto", machine=slow, max_tokens=1024)).values()
    assert limit.count is not None and 1024 < limit.count <= 65536


def test_the_reason_names_the_size_at_which_the_host_is_the_limit() -> None:
    graph = HandGraph()
    graph.output(through(graph, graph.input(64, 8192, dtype=BF16, dynamic=[0]), 2))
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
    text = graph.run(schedule="auto").sites[0].decision.reasons[0].text
    assert "is 1024, the GPU is estimated to need 536 us for the graph, and the host 420 us" in text


def test_forward_and_backward_have_guards_of_their_own() -> None:
    """The backward has twice as many features. So it is no longer limited by the host at half as many tokens."""
    graph = HandGraph()
    ahead = graph.input(1500, 8192, dtype=BF16, dynamic=[0])
    back = graph.input(1500, 8192, dtype=BF16, name="tangents_1", dynamic=[0])
    graph.output(through(graph, ahead, 2), through(graph, through(graph, back, 2), 2))
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
    assert {str(guard.expr.lhs) for guard in graph.shapes.guards} == {
        str(x.meta["val"].shape[0]) for x in (ahead, back)
    }


def test_a_site_of_fixed_size_beside_dynamic_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the gather and its matmul are fixed. The site is overlapped in the graph for many tokens, and left
    as written in the graph for few."""

    def statuses(tokens: int) -> list[str]:
        graph = HandGraph()
        y = through(graph, graph.input(tokens, 8192, dtype=BF16, dynamic=[0]), 2)
        fixed = graph.input(4096, 8192, dtype=BF16, name="fixed")
        z = graph.mm(graph.gather(fixed), graph.input(8192, 4096, dtype=BF16, name="weight"))
        graph.output(y, z)
        host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
        return [s.decision.status for s in graph.run(schedule="auto").sites if s.facts.pattern == "all_gather_matmul"]

    slow = dataclasses.replace(machine_for("cuda"), launch_seconds=3e-4)
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: slow)
    assert statuses(16384) == ["overlapped"] and statuses(64) == ["kept"]


@pytest.mark.parametrize("switches", [{"schedule": "ring"}, {"mode": "report"}])
def test_no_guard_is_added_if_no_schedule_is_chosen_by_the_host(switches: dict[str, str]) -> None:
    graph = HandGraph()
    graph.output(through(graph, graph.input(64, 8192, dtype=BF16, dynamic=[0]), 2))
    host_guard.guard_counts(graph.graph, OverlapConfig(**{"schedule": "auto", **switches}), None)
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), "refused")
    assert not graph.shapes.guards


def test_a_failure_adds_no_guard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no sites today")

    monkeypatch.setattr(host_guard.SiteFinder, "run", fail)
    graph = HandGraph()
    graph.output(through(graph, graph.input(64, 8192, dtype=BF16, dynamic=[0]), 2))
    host_guard.guard_counts(graph.graph, OverlapConfig(schedule="auto"), None)
    assert not graph.shapes.guards and "adding guards for token counts failed" in caplog.text


def test_dynamic_tokens_of_a_graph_that_is_always_host_bound() -> None:
    slow = '{"launch_seconds": 1, "call_seconds": 1}'
    assert codes(layers(2048, 2, dynamic=True, machine=slow)) == ["host_bound"] * 2
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert codes(layers(2048, 2, dynamic=True, machine='{"graph_seconds": 100}')) == ["host_bound"] * 2


def test_a_cuda_graph_of_few_dynamic_tokens_has_no_small_message() -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        plan = served(layers(64, 2, dynamic=True))
    assert [schedule for schedule, _, _ in plan][:2] == ["keep", "chunked"] and plan[1][1] == 2048


def test_a_forced_schedule_and_a_stated_host_time_are_obeyed() -> None:
    assert codes(layers(1024, 2, schedule="chunked")) == ["chunked"] * 2
    assert set(codes(layers(1024, 2, machine='{"launch_seconds": 1e-9, "call_seconds": 1e-9}'))) <= {"chunked", "fused"}


def test_a_matmul_with_another_dtype_of_its_result() -> None:
    """PyTorch's FLOP formula raises for this matmul. The graph must still be host-bound."""
    graph = HandGraph()
    x = through(graph, graph.input(1024, 8192, dtype=BF16), 2)
    a, b = graph.input(4, 128, 64, dtype=BF16, name="a"), graph.input(4, 64, 128, dtype=BF16, name="b")
    product = graph.graph.call_function(torch.ops.aten.bmm.dtype, (a, b, torch.float32))
    product.meta["val"] = graph.call(torch.ops.aten.bmm.default, a, b).meta["val"].float()
    report = graph.output(x, product).run(schedule="auto")
    assert codes(report) == ["host_bound"] * 2 and not report.failures


def joint(forward: int, backward: int) -> list[bool]:
    """For each collective of a joint graph with two layers per direction: whether ``host_time.limits`` leaves its site
    as written. The arguments are token counts."""
    graph = HandGraph()
    ahead = through(graph, graph.input(forward, 8192, dtype=BF16), 2)
    back = through(graph, graph.input(backward, 8192, dtype=BF16, name="tangents_1"), 2)
    found = graph.output(ahead, back).found("forward")
    limited = host_time.limits(found, OverlapConfig(schedule="auto"))
    return [node in limited for node in found.collectives]


def test_the_two_directions_of_a_joint_graph_are_launched_one_by_one() -> None:
    """A joint graph must be planned as its forward and its backward graph will be."""
    assert joint(1024, 8192) == [True, True, False, False]
    assert joint(8192, 1024) == [False, False, True, True]


def test_each_collective_has_the_links_of_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first all-reduce has fast links. The second has no peer access, and takes about 60 times as long as the GPU's
    other work."""
    slow = dataclasses.replace(machine_for(WITHOUT_PEERS), link_bytes=1e9)
    real, calls = site_sizes.machine_at, list[str]()

    def machine_at(collective: CollectiveNode, config: OverlapConfig) -> Machine:
        calls.append(collective.node.name)
        return real(collective, config) if collective.node.name == "all_reduce_default" else slow

    monkeypatch.setattr(site_sizes, "machine_at", machine_at)
    graph = HandGraph()
    x = through(graph, graph.input(1024, 8192, dtype=BF16), 2)
    assert not host_time.limits(graph.output(x).found(), OverlapConfig(schedule="auto"))
    assert set(calls) == {"all_reduce_default", "all_reduce_default_1"}

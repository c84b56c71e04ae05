# SPDX-License-Identifier: Apache-2.0
"""Schedules ``small_message``, ``chunked`` and ``wave_groups``: when ``auto`` chooses them, which op replaces a site,
and which sites are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import fx

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from overlap_inductor.torch_compat import symmetric
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

BF16 = torch.bfloat16
prims = torch.ops.prims


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that ranks reach each other's memory and that kernels can run."""
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)
    monkeypatch.setattr(symmetric, "why_no_kernels", lambda device: None)


def product(made: HandGraph, name: str, rows: int = 6, inner: int = 16, columns: int = 32) -> fx.Node:
    return made.mm(
        made.input(rows, inner, name=name, dtype=BF16), made.input(inner, columns, name=f"w_{name}", dtype=BF16)
    )


def norm(made: HandGraph, added: fx.Node, gain: fx.Node) -> fx.Node:
    wide = made.call(prims.convert_element_type.default, added, torch.float32)
    mean = made.call(aten.mean.dim, made.call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    scaled = made.call(aten.mul.Tensor, wide, made.call(aten.rsqrt.default, made.call(aten.add.Tensor, mean, 1e-5)))
    rounded = made.call(prims.convert_element_type.default, scaled, BF16)
    return made.call(aten.mul.Tensor, gain, rounded)


def one_row(made: HandGraph) -> fx.Node:
    return made.input(32, name="gain", dtype=BF16)


def decoded(before_the_add: Callable[[HandGraph], None] = lambda made: None) -> HandGraph:
    made = HandGraph()
    residual, gain = made.input(6, 32, name="residual", dtype=BF16), one_row(made)
    summed = made.reduce(product(made, "x"))
    before_the_add(made)
    added = made.call(aten.add.Tensor, residual, summed)
    return made.output(norm(made, added, gain), added)


def ops(report: OverlapReport) -> list[str]:
    names = [
        line.split("overlap_inductor.")[1].split(".default")[0]
        for line in report.after.splitlines()
        if "overlap_inductor." in line
    ]
    return [name for name in names if name not in ("agree", "follow")]


def test_a_norm_is_written_with_its_all_reduce() -> None:
    with fake_group(2):
        report = decoded().run(schedule="small_message", mode="strict")
    assert (
        ops(report) == ["small_message_matmul_all_reduce_norm"]
        and "rsqrt" not in report.after
        and "_c10d_functional" not in report.after
    )
    (piece,) = report.sites[0].decision.plan
    assert piece.parameters == {"settings": "{}", "norm": True} and piece.tokens == (0, None)


def test_a_matmul_does_not_move_after_a_write_to_its_operand() -> None:
    """The op with the norm would stand at the add, after the write, and would read the overwritten operand. So the pass
    uses the op without the norm."""

    def overwritten(made: HandGraph) -> None:
        x, other = next(n for n in made.graph.nodes if n.name == "x"), made.input(6, 16, name="y", dtype=BF16)
        made.call(aten.copy_.default, x, other)

    with fake_group(2):
        report = decoded(overwritten).run(schedule="small_message", mode="strict")
    assert ops(report) == ["small_message_matmul_all_reduce"] and "rsqrt" in report.after
    lines = report.after.splitlines()
    assert next(i for i, line in enumerate(lines) if "small_message" in line) < next(
        i for i, line in enumerate(lines) if "copy_" in line
    )


def test_two_all_reduces_before_one_norm_are_overlapped_without_it() -> None:
    """The all-reduces belong to two groups, so they are two sites. Neither takes the norm."""
    with fake_group(2) as first:
        second = dist.new_group([0, 1])
        made = HandGraph()
        gain, sums = one_row(made), []
        for name, group in (("x", first), ("y", second)):
            made.group = group.group_name
            sums.append(made.reduce(product(made, name)))
        added = made.call(aten.add.Tensor, *sums)
        report = made.output(norm(made, added, gain), added).run(schedule="small_message", mode="strict")
    assert ops(report) == ["small_message_matmul_all_reduce"] * 2 and "rsqrt" in report.after


@pytest.mark.parametrize(
    ("schedule", "pattern", "transport"),
    [
        ("chunked", "gather", "copy_engine or sm_push"),
        ("chunked", "scatter", "copy_engine or sm_push"),
        ("chunked", "reduce", "copy_engine or sm_push"),
        ("wave_groups", "scatter", "nccl"),
        ("wave_groups", "reduce", "nccl"),
        ("small_message", "reduce", "sm_push"),
    ],
)
def test_one_op_serves_a_site(schedule: str, pattern: str, transport: str) -> None:
    with fake_group(2):
        made = HandGraph()
        x, w = made.input(48, 16, name="x", dtype=BF16), made.input(16, 40, name="w", dtype=BF16)
        made.output(made.mm(made.gather(x), w) if pattern == "gather" else getattr(made, pattern)(made.mm(x, w)))
        report = made.run(schedule=schedule, mode="strict")
    names = {"gather": "all_gather_matmul", "scatter": "matmul_reduce_scatter", "reduce": "matmul_all_reduce"}
    assert ops(report) == [f"{schedule}_{names[pattern]}"] and report.sites[0].decision.plan[0].transport == transport


@pytest.mark.parametrize(
    ("schedule", "made", "text"),
    [
        (
            "small_message",
            lambda made: made.scatter(product(made, "x")),
            "no small-message kernel computes matmul_reduce_scatter",
        ),
        ("small_message", lambda made: made.reduce(product(made, "x", rows=2**18)), "are too many for a small message"),
        (
            "wave_groups",
            lambda made: made.mm(
                made.gather(made.input(6, 16, name="x", dtype=BF16)), made.input(16, 8, name="w", dtype=BF16)
            ),
            "computes all_gather_matmul",
        ),
        ("small_message", lambda made: made.gather(product(made, "x")), "computes matmul_all_gather"),
    ],
)
def test_a_site_that_a_schedule_does_not_support_is_refused_with_a_reason(
    schedule: str, made: Callable[[HandGraph], fx.Node], text: str
) -> None:
    with fake_group(2):
        graph = HandGraph()
        (site,) = graph.output(made(graph)).run(schedule=schedule).sites
    assert site.decision.reasons[0].code == "schedule_not_available" and text in site.decision.reasons[0].text


@pytest.mark.parametrize(
    ("pattern", "schedule"), [("scatter", "wave_groups"), ("reduce", "wave_groups"), ("gather", "keep")]
)
def test_auto_takes_groups_of_waves_if_peers_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, pattern: str, schedule: str
) -> None:
    """``auto`` must not choose the ring, which was measured to be slower than the plain graph. ``wave_groups`` computes
    no gathers, so a gather is kept."""
    monkeypatch.setattr(
        symmetric, "why_no_symmetric_memory", lambda ranks, device: "this GPU cannot reach the memory of GPUs (1,)"
    )
    monkeypatch.setattr(symmetric, "reach", lambda: symmetric.Reach((9, 0), 2, 2, (1,)))
    monkeypatch.setattr(symmetric, "_all_cut_off", lambda gpus: gpus == (0, 1))
    with fake_group(2):
        made = HandGraph()
        x, w = made.input(4096, 14336, name="x", dtype=BF16), made.input(14336, 8192, name="w", dtype=BF16)
        (site,) = (
            made.output(made.mm(made.gather(x), w) if pattern == "gather" else getattr(made, pattern)(made.mm(x, w)))
            .run(schedule="auto")
            .sites
        )
    assert [p.schedule for p in site.decision.plan] == [schedule], site.decision


def test_peers_are_out_of_reach_only_within_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``without_peers`` is true only if all ranks are on one machine, and no rank's GPU reaches the memory of another.
    In this test, GPUs 0 and 1 reach each other, and so do GPUs 2 and 3."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    symmetric._all_cut_off.cache_clear()
    for facts, ranks, expected in (
        (((9, 0), 4, 4, (2, 3)), (0, 2), True),
        (((9, 0), 4, 4, (2, 3)), (0, 1), False),
        (((9, 0), 4, 4, (2, 3)), (0, 1, 2, 3), False),
        (((9, 0), 4, 4, (2, 3)), (0, 6), False),
        (((9, 0), 1, 4, ()), (0, 2), False),
        (None, (0, 2), False),
    ):
        monkeypatch.setattr(symmetric, "reach", lambda facts=facts: facts and symmetric.Reach(*facts))
        assert symmetric.without_peers(ranks, device) is expected, (facts, ranks)
    symmetric._all_cut_off.cache_clear()


def test_auto_takes_small_messages_for_few_tokens_and_kernels_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    chosen = {}
    with fake_group(4):
        for rows in (16, 16384):
            made = HandGraph()
            (site,) = made.output(made.reduce(product(made, "x", rows, 7168, 8192))).run(schedule="auto").sites
            chosen[rows] = site.decision.plan[0].schedule
    assert chosen == {16: "small_message", 16384: "fused"}

# SPDX-License-Identifier: Apache-2.0
"""Passes of Inductor that run after the overlap pass and move nodes. If such a pass is on, no ring is unrolled. If a
step of an unrolled ring is moved all the same, the compile ends with an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.errors import OverlapError
from overlap_inductor.inductor import lowerings as lowering
from overlap_inductor.runtime import agreement
from overlap_inductor.torch_compat import ordering
from overlap_inductor.torch_compat.functional_collectives import all_gather
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

SETTINGS: list[dict[str, Any]] = [
    {"bucket_all_gathers_fx": "all"},
    {"bucket_reduce_scatters_fx": "all"},
    {"bucket_all_reduces_fx": "all"},
    {"aten_distributed_optimizations.enable_overlap_scheduling": True},
]
"""Settings that turn on a pass that moves nodes. With ``enable_overlap_scheduling``, programs with unrolled rings
deadlocked or gave wrong results."""


def sites() -> HandGraph:
    """A gather before a matmul, and a scatter after another one."""
    made = HandGraph()
    up, down = made.input(16, 8, name="up"), made.input(8, 16, name="down")
    hidden = made.call(aten.relu.default, made.mm(made.gather(made.input(4, 16)), up))
    return made.output(made.scatter(made.mm(hidden, down)))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_no_ring_is_unrolled_if_a_later_pass_moves_nodes(setting: dict[str, Any]) -> None:
    with fake_group(2):
        assert [s.decision.moving.parameters["unrolled"] for s in sites().run().sites] == [True, True]
        with torch._inductor.config.patch(setting):
            made = sites()
            report = made.run()
    assert [(s.decision.status, s.decision.moving.parameters["unrolled"]) for s in report.sites] == [
        ("overlapped", False)
    ] * 2
    assert not any(f"{name}." in made.text() for name in (*ordering.STARTS, *ordering.MEMBERS))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_no_ring_of_a_rewritten_stretch_is_unrolled_if_a_later_pass_moves_nodes(setting: dict[str, Any]) -> None:
    """The sites that the sequence-parallel rewrite makes are not unrolled either."""
    with fake_group(2), torch._inductor.config.patch(setting):
        made = HandGraph()
        total = made.reduce(made.mm(made.input(8, 16), made.input(16, 32, name="down")))
        made.output(made.mm(made.call(aten.relu.default, total), made.input(32, 16, name="up")))
        (stretch,) = made.divide()
        report = made.run()
    assert stretch.status == "rewritten"
    assert [(s.decision.status, s.decision.moving.parameters["unrolled"]) for s in report.sites] == [
        ("overlapped", False)
    ] * 2


def test_a_moved_step_is_detected() -> None:
    """A read must stay after the wait for its data, and before the next write to the buffer. The check finds a read
    outside this range."""
    with fake_group(2):
        made = sites()
        made.run()
        graph = made.graph
        assert ordering.moved(graph) is None
        steps = [n for n in graph.nodes if n.target is torch.ops.overlap_inductor.gather_step.default]
        pieces = [
            n for n in graph.nodes if n.target is torch.ops.overlap_inductor.take.default and steps[0].args[1] in n.args
        ]
        late = next(n for n in pieces if n > steps[0])
        before = late.prev
        steps[0].prepend(late)
        assert ordering.moved(graph) is not None
        before.append(late)
        assert ordering.moved(graph) is None
        early = next(n for n in pieces if n < steps[0])
        steps[0].append(early)
        assert ordering.moved(graph) is not None


def test_a_read_before_the_parts_are_written_is_detected() -> None:
    """The parts of a result are written to an empty tensor. A read that moves before the last write is found."""
    with fake_group(4):
        made = HandGraph()
        rows = made.call(aten.relu.default, made.scatter(made.mm(made.input(64, 32), made.input(32, 64, name="w"))))
        product = made.mm(made.gather(rows), made.input(64, 48, name="up"))
        made.output(made.call(aten.sin.default, product)).run(schedule="ring", sub_chunks=2)
        graph = made.graph
        assert ordering.moved(graph) is None
        last = [n for n in graph.nodes if n.target is torch.ops.overlap_inductor.place_ranks.default][-1]
        read = next(user for user in last.args[0].users if user > last)
        last.prepend(read)
        assert ordering.moved(graph) == read.name


def test_a_moved_step_is_an_error_of_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "require", lambda group, plan: None)
    monkeypatch.setattr(lowering, "moved", lambda graph: "take_default")
    compiled = torch.compile(lambda x, w: all_gather(x, 0, dist.group.WORLD) @ w)
    settings = torch._inductor.config.patch(force_disable_caches=True)
    with (
        fake_group(2),
        settings,
        torch.no_grad(),
        overlap_inductor.overlap(schedule="ring"),
        pytest.raises(Exception, match="take_default reads or writes a buffer of a ring's steps") as raised,
    ):
        compiled(torch.randn(8, 16), torch.randn(16, 8))
    assert OverlapError.__name__ in str(raised.value) or isinstance(raised.value, OverlapError)

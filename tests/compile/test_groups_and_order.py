# SPDX-License-Identifier: Apache-2.0
"""Several groups, collectives that stay in the graph, and the order that all ranks must keep."""

from __future__ import annotations

import re

import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.compile.readings import traced
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import c10d
from tests.support.spellings import world


def test_other_groups_are_left_alone_and_in_order() -> None:
    """On a 2-D mesh, the tensor-parallel site is overlapped. The data-parallel collectives keep their number,
    their group and their order."""
    with fake_group(8, 3), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        tp, dp = mesh.get_group("tp"), mesh.get_group("dp")

        def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = all_reduce(g, "sum", dp)
            y = all_reduce(x @ w, "sum", tp)
            return first, y, all_gather(h, 0, dp)

        report = report_of(fn, torch.randn(8, 16), torch.randn(16, 8), torch.randn(3), torch.randn(5))
        names = tp.group_name, dp.group_name
    (site,) = report.sites
    assert site.facts.collective.group_name == names[0] and site.facts.collective.ranks == (0, 1, 2, 3)
    assert site.facts.collective.mesh_dim == "tp"
    assert [(m.collective.group_name, m.reason.code) for m in report.near_misses] == [(names[1], "no_matmul")] * 2

    def kept(text: str) -> list[str]:
        return re.findall(r"_c10d_functional\.(\w+)\.default\(.*'" + re.escape(names[1]) + "'", text)

    assert kept(report.before) == kept(report.after) == ["all_reduce", "all_gather_into_tensor"]
    assert "overlap_inductor.follow" not in report.after
    assert set(re.findall(r"overlap_inductor\.agree\.default\('(\w+)'", report.after)) == {names[0]}


def test_ranks_of_a_sub_group_of_a_mesh_have_one_text() -> None:
    """The graphs of a sub-group's first and last rank must be equal as text. Graphs of two sub-groups may differ."""
    texts: dict[int, set[str]] = {0: set(), 1: set()}
    for rank in (0, 3, 4, 7):
        with fake_group(8, rank), torch.no_grad():
            group = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).get_group("tp")
            report = report_of(
                lambda x, w, group=group: all_gather(x, 0, group) @ w, torch.randn(4, 16), torch.randn(16, 8)
            )
            assert [s.decision.status for s in report.sites] == ["overlapped"]
            texts[rank // 4].add(report.after)
    assert len(texts[0]) == len(texts[1]) == 1


def test_kept_collectives_of_the_group_are_chained() -> None:
    """All ranks must call a kept collective and a ring's steps in one order. So Inductor must not move the collective
    across the steps."""
    with fake_group(2):
        made = HandGraph()
        x, w, g, h = made.input(4, 16), made.input(16, 8, name="w"), made.input(3, name="g"), made.input(3, name="h")
        early = made.reduce(g)
        y = made.mm(made.gather(x), w)
        late = made.reduce(h)
        report = made.output(early, y, late).run(sub_chunks=1)
    assert [f[2] for f in facts(report)] == ["overlapped"] and codes(report) == ["no_matmul"] * 2
    lines = report.after.splitlines()
    (follow,) = [line for line in lines if "overlap_inductor.follow.default" in line]
    assert "all_reduce_default" in follow
    assert lines.index(follow) < next(i for i, line in enumerate(lines) if "gather_start.default" in line)
    late_line = next(line for line in lines if line.startswith("all_reduce_default_1"))
    assert "control_deps" in late_line and "gather_step_default" in late_line


def test_a_kept_collective_after_a_looping_op() -> None:
    """The kept collective needs an edge from one of the looping op's results. Without the edge, a rank could run the
    collective first."""
    with fake_group(1024):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        report = made.output(y, made.reduce(made.input(3, name="h"))).run()
    assert "overlap_inductor.all_gather_matmul.default" in report.after
    (line,) = [line for line in report.after.splitlines() if line.startswith("all_reduce_default")]
    assert "control_deps" in line and "getitem" in line


def test_every_group_agrees_before_any_data_moves() -> None:
    """If one group began to move data before another group agreed, the other group could find a difference too late."""
    with fake_group(8, 3), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
        fn = lambda x, w, v: all_reduce(all_reduce(x @ w, "sum", tp).relu() @ v, "sum", dp)  # noqa: E731
        report = report_of(fn, torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 8))
    lines = report.after.splitlines()
    agreed = [i for i, line in enumerate(lines) if ".agree.default" in line]
    assert len(agreed) == 2 and max(agreed) < next(i for i, line in enumerate(lines) if "exchange_start" in line)
    assert sum(".follow.default" in line for line in lines) == 2


def test_sites_of_one_group_share_one_chain() -> None:
    """Each group of a graph agrees once, and has one order of all ops that communicate."""
    report = traced(
        lambda x, w, v: reduce_scatter((all_gather(x, 0, world()) @ w).relu() @ v, "sum", 0, world()),
        (4, 16),
        (16, 8),
        (8, 16),
        sub_chunks=1,
    )
    assert [f[::2] for f in facts(report)] == [
        ("all_gather_matmul", "overlapped"),
        ("matmul_reduce_scatter", "overlapped"),
    ]
    assert report.after.count("overlap_inductor.agree.default(") == 1
    order = re.findall(
        r"overlap_inductor\.(gather_start|gather_step|exchange_start|exchange_send|exchange_wait)", report.after
    )
    assert order == ["gather_start", "gather_step", "exchange_start", "exchange_send", "exchange_wait"]


def test_ids_differ_and_stay() -> None:
    """Equal layers must have different ids, and an id must not change from run to run."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_reduce(all_reduce(x @ w, "sum", world()).relu() @ w, "sum", world())

    first, second = ([s.facts.id for s in traced(fn, (4, 16), (16, 16)).sites] for _ in range(2))
    assert len(set(first)) == 2 and first == second


def test_a_collective_without_a_matmul_is_not_changed() -> None:
    """The collective keeps its arguments, although its group also has an overlapped site."""
    with fake_group(4):
        made = HandGraph()
        started = made.call(c10d.all_gather_into_tensor.default, made.input(3), 4, made.group)
        report = made.output(
            made.wait(started), made.mm(made.gather(made.input(4, 16, name="a")), made.input(16, 8, name="w"))
        ).run()
    assert "_c10d_functional.all_gather_into_tensor.default(x, 4, '0')" in report.after

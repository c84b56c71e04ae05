# SPDX-License-Identifier: Apache-2.0
"""A matmul that only the graph's output needs is delayed, so that it runs under a transfer that nothing else hides."""

from __future__ import annotations

import re

import pytest
import torch

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.generated_code import lines_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.spellings import world

SMALL, LARGE = (8, 2000), (8, 4_000_000)
"""Shapes of the right operand of the matmul for a weight's gradient. With ``LARGE``, this matmul takes much longer than
the transfer."""
MIDDLE = (25_000, 24_999)
"""Numbers of columns of two gradients. Computing either gradient takes longer than the transfers of one small site."""


def _lines(gradient: tuple[int, int], read_elsewhere: bool = False) -> list[str]:
    """The lines of a rewritten graph. The graph computes a gradient, then has a site, then a gather that is no site."""
    with fake_group(2):
        made = HandGraph()
        x, w, rows = made.input(8, 16), made.input(16, 32, name="w"), made.input(512, 512, name="rows")
        columns = made.call(aten.permute.default, made.input(8, 64, name="dy"), [1, 0])
        dw = made.mm(columns, made.input(*gradient, name="features"))
        results = [dw] if not read_elsewhere else [made.call(aten.relu.default, dw)]
        y = made.mm(made.gather(x), w)
        report = made.output(y, made.call(aten.relu.default, made.gather(rows)), *results).run(sub_chunks=1)
    assert [s.decision.status for s in report.sites] == ["overlapped"] and not report.failures
    return report.after.splitlines()


def _place(lines: list[str], text: str) -> int:
    return next(i for i, line in enumerate(lines) if text in line and "= subgraph" not in line)


def test_a_gradient_runs_under_a_gather_that_is_no_site() -> None:
    lines = _lines(SMALL)
    start, wait = _place(lines, "subgraph_all_gather"), _place(lines, "subgraph_wait_tensor")
    assert start < _place(lines, "[64, 2000] = aten.mm") < wait
    assert "control_deps([after_default]" in lines[wait]


def test_an_op_that_waits_itself_is_left_alone() -> None:
    """DTensor changes the sharded dim with one op that also waits for its transfer. So no matmul can run under it."""
    with fake_group(4) as group:
        made = HandGraph()
        dw = made.mm(made.input(64, 8, name="dy"), made.input(*SMALL, name="features"))
        y = made.mm(made.gather(made.input(8, 16)), made.input(16, 32, name="w"))
        op = torch.ops._dtensor.shard_dim_alltoall.default
        moved = made.call(op, made.input(512, 512, name="rows"), 0, 1, group.group_name)
        report = made.output(y, made.call(aten.relu.default, moved), dw).run(sub_chunks=1)
    assert not report.failures and [s.decision.status for s in report.sites] == ["overlapped"]
    assert "shard_dim_alltoall" in report.after
    assert not re.search(r"overlap_inductor\.after\.default\(.*shard_dim_alltoall", report.after)


def test_a_gradient_stays_where_it_does_not_help() -> None:
    """A gradient is not delayed if another op reads it, or if it takes much longer than the transfer."""
    for lines in (_lines(SMALL, read_elsewhere=True), _lines(LARGE)):
        assert _place(lines, "= aten.mm") < _place(lines, "gather_start.default")
        assert not any("overlap_inductor.after.default" in line for line in lines)


def _beside_a_gather(world_size: int, *rows: int, columns: int = 2000, sub_chunks: int = 1) -> list[str]:
    """The lines of a rewritten graph that computes gradients of so many rows, and then has one gather. Each gradient is
    transposed."""
    with fake_group(world_size):
        made = HandGraph()
        features = made.input(8, columns, name="features")
        gradients = [made.mm(made.input(n, 8, name=f"dy{i}"), features) for i, n in enumerate(rows)]
        turned = [made.call(aten.permute.default, dw, [1, 0]) for dw in gradients]
        y = made.mm(made.gather(made.input(512, 16)), made.input(16, 32, name="w"))
        report = made.output(y, *turned).run(sub_chunks=sub_chunks)
    assert not report.failures and [s.decision.status for s in report.sites] == ["overlapped"]
    return report.after.splitlines()


def _places(lines: list[str], text: str) -> list[int]:
    return [i for i, line in enumerate(lines) if text in line]


def test_a_gradient_runs_under_a_gather_of_two_ranks() -> None:
    """Two ranks start all sends of a gather at once, so the whole gradient runs before the first wait."""
    lines = _beside_a_gather(2, 64, sub_chunks=2)
    start, gradient, wait = (
        _place(lines, text) for text in ("gather_start.default", "[64, 2000] = aten.mm", "gather_step.d")
    )
    assert start < gradient < wait and "[after_default]" in lines[wait]


LONG = 30_000
"""Columns of a gradient that takes longer than the transfers of the gather."""


@pytest.mark.parametrize(("sub_chunks", "waits"), [(1, [0, 1, 2]), (2, [0, 2, 4])])
def test_a_gradient_is_spread_under_a_gather_of_more_ranks(sub_chunks: int, waits: list[int]) -> None:
    """With four ranks, waits also pass shards on. So a third of the gradient runs before each shard's first wait, and
    after the wait in front of that, if there is one."""
    lines = _beside_a_gather(4, 200, columns=LONG, sub_chunks=sub_chunks)
    steps = _places(lines, "gather_step.default(")
    cuts = [re.search(r"slice.Tensor\(dy0, 0, (\d+), (\d+)\)", line) for line in lines]
    assert [tuple(map(int, cut.groups())) for cut in cuts if cut] == [(0, 64), (64, 128), (128, 200)]
    after = _places(lines, f", {LONG}] = overlap_inductor.after.default(")
    assert len(steps) == 3 * sub_chunks and len(after) == 3
    for ordered, wait in zip(after, waits, strict=True):
        before = steps[wait - 1] if wait else _place(lines, "gather_start.default")
        name, token = (_name(lines[line]) for line in (ordered, before))
        assert before < ordered - 1 and "= aten.mm.default(slice" in lines[ordered - 1]
        assert (
            re.search(rf"\b{token}\b", lines[ordered]) and f"[{name}]" in lines[steps[wait]] and ordered < steps[wait]
        )
    joined = _place(lines, f"[200, {LONG}] = aten.cat.default([{', '.join(_name(lines[i]) for i in after)}])")
    assert after[-1] < joined < _place(lines, f"[{LONG}, 200] = aten.permute.default(") < steps[waits[-1]]


def _name(line: str) -> str:
    return line.split(":")[0].strip()


def test_short_gradients_run_whole_before_one_wait_each() -> None:
    lines = _beside_a_gather(4, 64, 64, columns=400)
    steps, after = _places(lines, "gather_step.default("), _places(lines, "[64, 400] = overlap_inductor.after.default(")
    assert len(after) == 2 and "aten.cat" not in "".join(lines)
    # The latest gradient moves first.
    assert after[0] < steps[0] < after[1] < steps[1]
    assert [re.search(r"dy\d", lines[line - 1]).group() for line in after] == ["dy1", "dy0"]  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [65, 100, 127])
def test_the_second_of_two_gradients_takes_the_other_waits(rows: int) -> None:
    """Two pieces and six waits: the first gradient takes waits 0 and 3, the second one waits 1 and 4."""
    lines = _beside_a_gather(4, rows, rows, columns=8000, sub_chunks=2)
    steps = _places(lines, "gather_step.default(")
    after = _places(lines, ", 8000] = overlap_inductor.after.default(")
    taken = [next(i for i, step in enumerate(steps) if line < step) for line in after]
    assert taken == [0, 1, 3, 4]
    assert len(_places(lines, "[64, 8000] = aten.mm")) == len(_places(lines, f"[{rows - 64}, 8000] = aten.mm")) == 2


def test_a_gradient_without_elements_stays() -> None:
    lines = _beside_a_gather(4, 0)
    assert not _places(lines, "overlap_inductor.after.default(")


def test_a_gradient_of_no_tokens_moves_whole() -> None:
    with fake_group(4):
        made = HandGraph()
        dw = made.mm(made.input(200, 0, name="dy"), made.input(0, 2000, name="features"))
        y = made.mm(made.gather(made.input(512, 16)), made.input(16, 32, name="w"))
        report = made.output(y, dw).run(sub_chunks=1)
    assert not report.failures and [s.decision.status for s in report.sites] == ["overlapped"]
    assert len(_places(report.after.splitlines(), "[200, 2000] = overlap_inductor.after.default(")) == 1


@pytest.mark.parametrize(("world_size", "pattern"), [(2, "all_gather_matmul"), (4, "matmul_reduce_scatter")])
def test_a_gradient_runs_under_the_longer_transfer_of_a_seam_in_bands(world_size: int, pattern: str) -> None:
    """The gradient runs between the last send and the first wait. Only the first wait needs an edge to the gradient."""
    with fake_group(world_size):
        made = HandGraph()
        x, w, up = made.input(64, 32), made.input(32, 64, name="w"), made.input(64, 48, name="up")
        columns = made.call(aten.permute.default, made.input(8, 64, name="dy"), [1, 0])
        dw = made.mm(columns, made.input(*SMALL, name="features"))
        rows = made.call(aten.relu.default, made.scatter(made.mm(x, w)))
        report = made.output(made.mm(made.gather(rows), up), dw).run(is_inference=False, sub_chunks=2)
    longer = next(s for s in report.sites if s.facts.pattern == pattern)
    assert [s.decision.moving.parameters["bands"] for s in report.sites] == [2, 2] and not report.failures
    lines = report.after.splitlines()
    sends, waits = (
        [i for i, line in enumerate(lines) if f".{op}.default(" in line and f"'{longer.facts.id}'" in line]
        for op in ("exchange_send", "exchange_wait")
    )
    gradient, ordered = _place(lines, "[64, 2000] = aten.mm"), _place(lines, "[64, 2000] = overlap_inductor.after")
    assert len(sends) == len(waits) == 2, "with 4 ranks, one op sends a band to all other ranks"
    assert sends[-1] < gradient < ordered < waits[0]
    name = lines[ordered].split(":")[0]
    assert [re.search(rf"\b{name}\b", lines[wait]) is not None for wait in waits] == [True, False]


def test_the_rest_of_the_gradients_runs_under_the_gather_in_bands() -> None:
    """One gradient alone takes longer than the scatter. So the other gradient runs under the gather."""
    with fake_group(2):
        made = HandGraph()
        x, w, up = made.input(64, 32), made.input(32, 64, name="w"), made.input(64, 48, name="up")
        columns = made.call(aten.permute.default, made.input(8, 64, name="dy"), [1, 0])
        gradients = [made.mm(columns, made.input(8, size, name=f"features{size}")) for size in MIDDLE]
        rows = made.call(aten.relu.default, made.scatter(made.mm(x, w)))
        report = made.output(made.mm(made.gather(rows), up), *gradients).run(is_inference=False, sub_chunks=2)
    scatter, gather = (s.facts.id for s in report.sites)
    lines = report.after.splitlines()
    first, second = sorted(_place(lines, f"[64, {size}] = aten.mm") for size in MIDDLE)
    waits = [
        [i for i, line in enumerate(lines) if ".exchange_wait.default(" in line and f"'{site}'" in line]
        for site in (scatter, gather)
    ]
    send = max(i for i, line in enumerate(lines) if ".exchange_send.default(" in line)
    assert first < waits[0][0] and waits[0][-1] < send < second < waits[1][0]


def test_order_in_the_generated_code() -> None:
    """One gradient runs while the scatter is in flight, and one while the gather is in flight."""

    def fn(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, rows, dy, features, others = tensors
        first, second = dy.t() @ features, dy.t() @ others
        y = reduce_scatter(x @ w, "sum", 0, world())
        return y, all_gather(rows, 0, world()).relu(), first, second

    shapes = (512, 16), (16, 512), (512, 512), (8, 64), (8, 100_000), (8, 99_999)
    # With ``reorder_for_locality``, Inductor moves the gradients of an inference graph behind both collectives before
    # our pass runs.
    code = lines_of(fn, *shapes, world_size=2, rank=0, options={"reorder_for_locality": False})
    lines = [line for line in code if line and line[0] != "#"]
    flights = {
        (_place(lines, "all_gather_into_tensor.default("), _place(lines, "wait_tensor.default(")),
        (
            max(i for i, line in enumerate(lines) if "exchange_send.default(" in line),
            _place(lines, "exchange_wait.default("),
        ),
    }
    gradients = [
        i
        for i, line in enumerate(lines)
        if "extern_kernels.mm(reinterpret_tensor(" in line and ", (64, 8), (1, 64)" in line
    ]
    assert len(gradients) == 2 and all(any(a < g < b for g in gradients) for a, b in flights), "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""Which ops of a layer of experts run in blocks of tokens, and which run whole before the first block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.support.experts import Experts
from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import summary
from tests.support.expert_layers import ApartExperts
from tests.support.expert_layers import BiasedExperts
from tests.support.expert_layers import inputs
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_by_fields

BLOCKS = 4


def _whole(report: OverlapReport) -> list[str]:
    """The grouped matmuls, ``exp``, ``cumsum`` and ``split`` that run before the first block. Ops on int32 tensors are
    left out."""
    lines = report.after.split("\n")
    start = next(i for i, line in enumerate(lines) if "overlap_inductor.agree" in line)
    marks = ("_grouped_mm.default", "exp.default", "cumsum.default", "split.Tensor")
    return [mark for line in lines[:start] for mark in marks if f"= aten.{mark}" in line and "int32" not in line]


def _multiplied(report: OverlapReport) -> int:
    return report.after.count("= aten._grouped_mm.default")


@pytest.mark.parametrize(("kind", "matmuls"), [(Experts, 2), (BiasedExperts, 2), (ApartExperts, 3)])
def test_all_grouped_matmuls_run_in_blocks(kind: type[Experts], matmuls: int) -> None:
    """With a budget of 1 node, the site becomes one looping op. Then no grouped matmul stays in the graph."""
    several = [{"step_node_budget": 10_000}, {"step_node_budget": 1}]
    with fake_group(2), torch.no_grad():
        found = reports_by_fields(kind(0, 2), *inputs(32), several=several, sub_chunks=2)
    for (report,), in_graph in zip(found, (matmuls * BLOCKS, 0), strict=True):
        assert summary(report) == [("matmul_all_reduce", None, ["grouped_mm M"] * matmuls, "overlapped")]
        assert _whole(report) == [] and _multiplied(report) == in_graph


def test_rows_are_gathered_in_blocks() -> None:
    """Each block copies the rows of its own tokens (``index``). No ``index`` copies the rows of all blocks."""
    with fake_group(2), torch.no_grad():
        report = report_of(Experts(0, 2), *inputs(32), sub_chunks=2)
    gathers = [line for line in report.after.split("\n") if "= aten.index.Tensor(arg1_1, " in line]
    assert len(gathers) == BLOCKS and all("bfloat16[16, 16]" in line for line in gathers)


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _first(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def _rest(h: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    rows = torch._grouped_mm(h, w, offs=ends)[places]
    return funcol.all_reduce(rows.view(-1, 2, rows.shape[-1]).sum(1), "sum", dist.group.WORLD)


def _read_elsewhere(
    x: torch.Tensor, w: torch.Tensor, e: torch.Tensor, other: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h = _first(x, w, e)
    return _rest(h.exp(), w, e, at), h


def _part_read_elsewhere(
    x: torch.Tensor, w: torch.Tensor, e: torch.Tensor, other: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, values = _first(x, w, e).chunk(2, -1)
    return _rest(torch.cat([gate.exp(), gate], 1), w, e, at), values


KEPT: dict[str, tuple[Layer, list[str]]] = {
    "the first result is read elsewhere": (_read_elsewhere, ["_grouped_mm.default"]),
    "a half of the columns is read elsewhere": (_part_read_elsewhere, ["_grouped_mm.default", "split.Tensor"]),
    "other ends of the experts' rows": (
        lambda x, w, e, other, at: _rest(_first(x, w, other).exp(), w, e, at),
        ["_grouped_mm.default"],
    ),
    "a sum over rows": (
        lambda x, w, e, other, at: _rest(_first(x, w, e).cumsum(0).exp(), w, e, at),
        ["_grouped_mm.default", "cumsum.default"],
    ),
    "rows are cut": (
        lambda x, w, e, other, at: _rest(torch.cat(_first(x, w, e).split(16, 0)[::-1]), w, e, at),
        ["_grouped_mm.default", "split.Tensor"],
    ),
    "weights are computed from rows": (
        lambda x, w, e, other, at: _rest(x, _first(x, w, e)[:16].unsqueeze(0).expand(4, 16, 16).contiguous(), e, at),
        ["_grouped_mm.default"],
    ),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.usefixtures("two")
def test_what_runs_whole(name: str) -> None:
    """If the first grouped matmul cannot run in blocks, the second one still runs in blocks."""
    layer, whole = KEPT[name]
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
    ends, other = torch.tensor([[8, 8, 20, 32], [4, 8, 20, 32]]).int().unbind()
    report = report_of(layer, x, w, ends, other, torch.arange(32).flip(0), sub_chunks=2)
    assert summary(report) == [("matmul_all_reduce", None, ["grouped_mm M"], "overlapped")]
    assert _whole(report) == whole and _multiplied(report) == 1 + BLOCKS

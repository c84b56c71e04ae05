# SPDX-License-Identifier: Apache-2.0
"""The graphs and the code of layers of experts: which layers are cut into blocks of tokens, and the order of the
steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.support.experts import Experts
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.expert_layers import inputs
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_by_fields
from tests.support.generated_code import lines_of
from tests.support.golden import check_golden

SITE = ("matmul_all_reduce", None, ["grouped_mm M", "grouped_mm M"], "overlapped")
ONE = ("matmul_all_reduce", None, ["grouped_mm M"], "overlapped")
STEP = {"extern_kernels._grouped_mm(": "matmul", "exchange_send.default(": "send", "exchange_wait.default(": "wait"}


def _report(world_size: int, rank: int, tokens: int = 32, **fields: object) -> OverlapReport:
    with fake_group(world_size, rank), torch.no_grad():
        return report_of(Experts(rank, world_size), *inputs(tokens), **fields)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 8))])
def test_ranks_agree_although_their_graphs_hold_the_rank(world_size: int) -> None:
    """A graph uses its rank's number only to select the rank's experts. The plans do not hold the number, so they are
    equal."""
    budgets, first_and_last = (10_000, 1), []
    for rank in (0, world_size - 1):
        with fake_group(world_size, rank), torch.no_grad():
            several = [{"step_node_budget": budget} for budget in budgets]
            reports = reports_by_fields(Experts(rank, world_size), *inputs(32), several=several)
            first_and_last.append([report for (report,) in reports])
    for budget, *found in zip(budgets, *first_and_last, strict=True):
        _check_agreement(found, budget)
    if world_size == 2 and torch.__version__.startswith("2.13"):
        check_golden(first_and_last[0][0].after, "experts/blocks.txt")


def _check_agreement(found: list[OverlapReport], budget: int) -> None:
    assert all(summary(r) == [SITE] and r.near_misses == [] for r in found)
    (first, last), plans = [r.before for r in found], {r.exchange for r in found}
    assert first != last and len(plans) == 1
    constant = re.compile(r"(ne\.Scalar\(\w+), \d+\)")
    assert len({constant.sub(r"\1, RANK)", text) for text in (first, last)}) == 1
    assert len({constant.sub(r"\1, RANK)", r.after) for r in found}) == 1
    assert "experts" not in str(json.loads(plans.pop())["steps"]) and (
        "grouped_matmul_all_reduce" in found[0].after
    ) == (budget == 1)


def test_other_spellings() -> None:
    x, ids, weights = inputs(16)
    for fields in ({"places": "argsort"}, {"places": "negative"}, {"late": True}):
        with fake_group(2), torch.no_grad():
            assert summary(report_of(Experts(0, 2, **fields), x, ids, weights)) == [SITE]


def test_a_reduce_scatter() -> None:
    def scatter(x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, "sum", 0, dist.group.WORLD)

    with fake_group(2), torch.no_grad():
        report = report_of(Experts(0, 2, reduce=scatter), *inputs(16))
    assert summary(report) == [("matmul_reduce_scatter", 0, ["grouped_mm M", "grouped_mm M"], "overlapped")]


def _rows(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def _sum(rows: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(rows.view(-1, 2, rows.shape[-1]).sum(1), "sum", dist.group.WORLD)


MISSES: dict[str, tuple[Callable[..., object], str, str]] = {
    "rows are read elsewhere": (lambda x, w, e, at: (_sum((y := _rows(x, w, e))[at]), y), "other_users", "output"),
    "a sum over rows between": (lambda x, w, e, at: _sum(_rows(x, w, e).cumsum(0)[at]), "grouped_matmul", "grouped_mm"),
    "two grouped matmuls": (
        lambda x, w, e, at: _sum((_rows(x, w, e) + _rows(x.sin(), w, e))[at]),
        "grouped_matmul",
        "grouped_mm",
    ),
    "columns are indexed": (lambda x, w, e, at: _sum(_rows(x, w, e)[:, at % 16]), "grouped_matmul", "grouped_mm"),
    "rows are chosen by a mask": (
        lambda x, w, e, at: _sum(_rows(x, w, e)[torch.nonzero_static(at > 3, size=8)[:, 0]].cumsum(1)),
        "grouped_matmul",
        "grouped_mm",
    ),
    "rows in no order of tokens": (
        lambda x, w, e, at: funcol.all_reduce(_rows(x, w, e), "sum", dist.group.WORLD),
        "grouped_matmul",
        "grouped_mm",
    ),
}


@pytest.mark.parametrize("name", MISSES)
@pytest.mark.usefixtures("two")
def test_a_near_miss(name: str) -> None:
    """The graph stays as written. The near miss names the grouped matmul, or the other reader of its rows."""
    function, code, named = MISSES[name]
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
    report = report_of(function, x, w, torch.tensor([8, 8, 20, 32]).int(), torch.arange(32).flip(0))
    assert summary(report) == [] and misses(report) == [("all_reduce", code)]
    assert named in report.near_misses[0].reason.text and report.after == report.before


def _mean(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    rows = _rows(x, w, ends)[places]
    return funcol.all_reduce(rows.view(-1, 2, rows.shape[-1]).mean(1), "sum", dist.group.WORLD)


@pytest.mark.usefixtures("two")
def test_what_no_looping_op_computes() -> None:
    """Unrolled steps also compute a mean over a token's experts. The looping op computes only a sum."""
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
    arguments = x, w, torch.tensor([8, 8, 20, 32]).int(), torch.arange(32).flip(0)
    (unrolled,), (looping,) = reports_by_fields(_mean, *arguments, several=[{}, {"step_node_budget": 1}])
    assert summary(unrolled) == [ONE]
    (site,) = looping.sites
    assert [r.code for r in site.decision.reasons] == ["too_many_steps"]


def test_a_dynamic_number_of_tokens() -> None:
    machine = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-6, "matmul_flops": {"2": 4e8}})
    arguments = inputs(64)
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 0)
    several = [{"schedule": "ring", "machine": machine}, {"schedule": "auto", "machine": machine}]
    with fake_group(2), torch.no_grad():
        (ring,), (auto,) = reports_by_fields(Experts(0, 2), *arguments, several=several)
    for report in (ring, auto):
        assert summary(report) == [SITE] and "grouped_matmul_all_reduce" in report.after
    floors, chosen = (
        [p.parameters["min_rows"] for p in report.sites[0].decision.plan if p.schedule == "ring"]
        for report in (ring, auto)
    )
    assert floors == [0] and chosen[0] > 0


def test_the_planner_counts_own_rows_and_repeated_reads_of_weights() -> None:
    """On a slow link, the all-reduce of many tokens is hidden. A layer with few tokens is kept. If memory is slow,
    a layer is also kept, because each block reads all weights again."""
    slow = {"link_bytes": 6.25e7, "step_seconds": 3e-6, "matmul_flops": {"2": 4e8}}
    reports = {
        name: _report(2, 0, tokens, schedule="auto", machine=json.dumps(machine))
        for name, tokens, machine in [
            ("many", 256, slow),
            ("few", 2, slow),
            ("slow memory", 256, {**slow, "memory_bytes": 1e6}),
        ]
    }
    assert {name: r.sites[0].decision.status for name, r in reports.items()} == {
        "many": "overlapped",
        "few": "kept",
        "slow memory": "kept",
    }
    estimate = reports["many"].sites[0].decision.moving.estimate_us
    # The planner expects half of the 512 rows for this rank's experts. The first grouped matmul has twice the FLOPs of
    # the second.
    assert estimate["matmul"] == pytest.approx(3 * 2 * 256 * 24 * 16 / 4e8 * 1e6, rel=0.01)


@pytest.mark.usefixtures("alone")
def test_each_block_is_sent_before_the_next_one_is_multiplied() -> None:
    """Each block runs both grouped matmuls. Before them, one kernel gathers only this block's rows, and casts no
    weights."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return Experts(3, 8)(x.bfloat16(), (x[:, :2].abs() * 100).long() % 8, x[:, 2:4].bfloat16())

    lines = lines_of(layer, (64, 16))
    found = [step for line in lines for mark, step in STEP.items() if mark in line and line.startswith("buf")]
    assert found == ["matmul", "matmul", "send"] * 7 + ["matmul", "matmul", "wait", "send", "wait"]
    # The kernel before a block's first grouped matmul reads the tokens and the block's places, mask and order.
    gathers = [line for line in lines if re.match(r"cpp_fused_\w*_grouped_mm_", line) and "arg0_1" in line]
    assert len(gathers) == 8 and all(line.count("buf") == 4 for line in gathers)

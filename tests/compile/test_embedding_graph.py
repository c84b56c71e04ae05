# SPDX-License-Identifier: Apache-2.0
"""The graphs and the code of lookups beside all-to-alls."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import overlap_inductor
from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.exchange_spellings import exchange
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.generated_code import events
from tests.support.generated_code import without_kernels
from tests.support.golden import check_golden
from tests.support.golden import report_text
from tests.support.graph_text import waste

PATTERN = "embedding_all_to_all"
SLOW = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-4})
FILES = {
    ("sum", "cat"): "embedding/bags.txt",
    ("embedding", "stack"): "embedding/rows.txt",
    ("mean", "tables first"): "embedding/tables_first.txt",
}


def _reports(kind: str, joined: str, tables: int = 3, mine: int = 4, **fields: Any) -> list[OverlapReport]:
    """The reports of the forward and the backward graph."""
    torch.manual_seed(0)
    model = DLRM(tables, 50, 4, 5, kind, joined)
    batch = batch_of(model, mine, 3, torch.Generator().manual_seed(1))
    return reports_of(model, *batch.arguments(), **fields)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="golden files are for torch 2.13")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize("spelling", FILES)
def test_golden(spelling: tuple[str, str], rank: int) -> None:
    with fake_group(2, rank):
        found = _reports(*spelling, tables=5, sub_chunks=1)
    assert not any(map(waste, found))
    text = "\n".join(f"{report_text(r)}\nbefore\n{r.before}\nafter\n{r.after}" for r in found)
    check_golden(text.rstrip() + "\n", FILES[spelling])


MODELS = list(itertools.product(("cat", "stack", "tables first"), ("sum", "mean", "embedding"), (2, 4, 8)))
QUICK = [("cat", "embedding", 4), ("stack", "mean", 8)]
"""With the golden models, these cover each way to join tables, each kind of lookup, and each number of ranks."""


@pytest.mark.parametrize(
    ("joined", "kind", "world_size"),
    [pytest.param(*model, marks=[] if model in QUICK else [pytest.mark.thorough]) for model in MODELS],
)
def test_every_exchange_of_a_model_is_a_site(joined: str, kind: str, world_size: int) -> None:
    with fake_group(world_size, world_size - 1):
        forward, backward = _reports(kind, joined)
    looked_up = "embedding" if kind == "embedding" else "embedding_bag"
    assert summary(forward) == [(PATTERN, 0, [f"{looked_up} M"] * 3, "overlapped")]
    assert summary(backward) == [(PATTERN, 0, ["embedding_gradient K"] * 3, "overlapped")]
    assert forward.near_misses == backward.near_misses == []


def _trained_code(kind: str, tables: int, **fields: Any) -> list[list[str]]:
    """The events of the generated code, forward and backward."""
    model = DLRM(tables, 50, 4, 5, kind)
    batch = batch_of(model, 4, 3, torch.Generator().manual_seed(1))
    compiled = torch.compile(model, dynamic=False)

    def step() -> None:
        compiled(*batch.arguments()).sum().backward()

    with (
        without_kernels(),
        functorch_config.patch(enable_autograd_cache=False),
        overlap_inductor.overlap(schedule="ring", sequence_parallel="off", **fields),
    ):
        _, codes = run_and_get_code(step)
    return [events([x.strip() for x in c[c.index("def call(") :].split("runner = ")[0].splitlines()]) for c in codes]


@pytest.mark.usefixtures("alone")
def test_tables_are_sent_while_others_are_looked_up() -> None:
    """Each table's results are sent before the next lookup. In backward, each table's gradient is computed before the
    next wait."""
    with fake_group(3):
        forward, backward = _trained_code("sum", 4, sub_chunks=2)
    assert [e for e in forward if e != "pointwise"][:14] == ["start", *["lookup", "send", "send"] * 4, "wait"]
    assert [e for e in backward if e not in ("pointwise", "mm")] == [
        "start",
        *["send"] * 8,
        *["wait", "gradient"] * 4,
    ]


@pytest.mark.usefixtures("alone")
def test_rows_are_looked_up_for_one_rank_after_the_other() -> None:
    """Each piece has one kernel of its own, and nothing is copied before the exchange. The rank's own rows are looked
    up last."""
    with fake_group(3):
        forward, _ = _trained_code("embedding", 2, sub_chunks=1)
    assert forward[: forward.index("wait") + 1] == ["start", *["pointwise", "send"] * 4, "pointwise", "wait"]


def test_the_lookups_themselves_do_not_change_and_ranks_compare_how_they_send() -> None:
    """Bags are looked up by the program's own ops with the program's own arguments. So results, saved tensors and
    errors stay the same."""
    with fake_group(2):
        forward, backward = _reports("sum", "cat")
        rows, _ = _reports("embedding", "cat")
    for report in (forward, backward):
        named = [re.findall(r"aten\._embedding_bag\w*\.default\(.*", t) for t in (report.before, report.after)]
        before, after = ([re.sub(r"\(\w+, ", "(", t) for t in texts] for texts in named)
        assert len(before) == 3 and before == after
    how = "by ring/p2p (route=direct, sub_chunks=3)"
    order = "in order [0, 2, 1, 3] of [2, 3, 4, 4] in embedding_all_to_all"
    (step,) = json.loads(forward.exchange)["steps"]
    assert step == f"g0: all_to_all float32 [8, 12] cut [3] by table {order} {how}"
    assert json.loads(rows.exchange)["steps"] == [step.replace("by table", "by rank and table")]
    assert json.loads(backward.exchange)["steps"] == [step.replace("by table", "by table, last first")]


def _bags(*tables: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    return [F.embedding_bag(indices, table, mode="sum") for table in tables]


def _indices(batch: int = 8) -> torch.Tensor:
    return torch.arange(3 * batch).view(batch, 3) % 7


def _miss(fn: Callable[..., Any], *args: torch.Tensor, **fields: Any) -> tuple[str, str]:
    report = report_of(fn, *args, **fields)
    assert summary(report) == []
    (near,) = report.near_misses
    return near.reason.code, near.reason.text


@pytest.mark.usefixtures("two")
def test_what_is_no_site_has_a_reason() -> None:
    w, v, i = torch.randn(7, 4), torch.randn(7, 6), _indices()
    code, text = _miss(lambda w, i: exchange(_bags(w, indices=i)[0]), w, i)
    assert code == "one_table" and "one table" in text
    code, text = _miss(lambda w, v, i: exchange(torch.cat(_bags(w, v, indices=i), 1)), w, v, i)
    assert code == "layout" and "different shapes" in text
    code, text = _miss(lambda w, i: exchange(torch.cat(_bags(w, w + 1, indices=i), 1).t().contiguous()), w, i)
    assert code == "layout"

    def uneven(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return funcol.all_to_all_single(torch.cat(_bags(w, w + 1, indices=i)), [8, 4], [8, 8], dist.group.WORLD)

    assert _miss(uneven, w, i)[0] == "uneven_splits"


def test_gradients_that_are_not_read_table_by_table() -> None:
    """The sum of two tables' results is exchanged, so one gradient arrives for both tables. Neither the forward's nor
    the backward's exchange is a site."""

    def layer(w: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        one, other = _bags(w, v, indices=i)
        return funcol.all_to_all_single_autograd(one + other, None, None, dist.group.WORLD).sin()

    with fake_group(2):
        w, v = (torch.randn(7, 4, requires_grad=True) for _ in range(2))
        forward, backward = reports_of(layer, w, v, _indices())
    assert misses(forward) == [("all_to_all", "one_table")] and misses(backward) == [("all_to_all", "layout")]


@pytest.mark.usefixtures("two")
def test_a_moving_pass_leaves_the_site() -> None:
    with inductor_config.patch(bucket_all_gathers_fx="all"):
        report = report_of(
            lambda w, v, i: exchange(torch.cat(_bags(w, v, indices=i), 1)),
            torch.randn(7, 4),
            torch.randn(7, 4),
            _indices(),
        )
    (site,) = report.sites
    assert site.decision.status == "refused" and [r.code for r in site.decision.reasons] == ["moving_pass"]


@pytest.mark.usefixtures("two")
def test_rows_that_are_pooled_by_a_sum_are_pooled_table_by_table() -> None:
    """A sum follows the lookup in each table. As with bags, the sum is not cut into pieces for each rank."""

    def layer(w: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return exchange(torch.cat([F.embedding(i, t).sum(1) for t in (w, v)], 1))

    report = report_of(layer, torch.randn(7, 4), torch.randn(7, 4), _indices())
    assert summary(report) == [(PATTERN, 0, ["embedding M"] * 2, "overlapped")]
    assert report.after.count("aten.sum.dim_IntList") == 2


@pytest.mark.usefixtures("two")
def test_results_that_are_also_read_elsewhere() -> None:
    def layer(w: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [F.embedding(i, t) for t in (w, v)]
        return exchange(torch.cat(rows, 1)), rows[0].sin()

    report = report_of(layer, torch.randn(7, 4), torch.randn(7, 4), _indices()[:, 0].contiguous())
    assert summary(report) == [(PATTERN, 0, ["embedding M"] * 2, "overlapped")]
    assert "cut [2] by table in" in report.exchange


def test_bags_of_dynamic_lengths() -> None:
    """The number of indices is known at run time only. The pieces do not depend on it."""
    with fake_group(2), torch.no_grad():
        model = DLRM(3, 50, 4, 5)
        batch = batch_of(model, 4, 3, torch.Generator().manual_seed(1))
        for indices in batch.indices:
            torch._dynamo.mark_dynamic(indices, 0)
        assert summary(report_of(model, *batch.arguments())) == [(PATTERN, 0, ["embedding_bag M"] * 3, "overlapped")]


def test_the_planner_estimates_both_ways() -> None:
    """On a slow link, lookups of long bags hide the exchange. If the batch is too small, the site is kept."""
    with fake_group(2):
        model = DLRM(8, 1000, 64, 5)
        batch = batch_of(model, 2048, 64, torch.Generator().manual_seed(1), square=True)
        many = reports_of(model, *batch.arguments(), schedule="auto", machine=SLOW, patterns=(PATTERN,))
        torch._dynamo.reset()
        few = _reports("sum", "cat", schedule="auto", machine=SLOW, patterns=(PATTERN,))
    for report in many:
        (site,) = report.sites
        estimate = site.decision.moving.estimate_us
        assert site.decision.source == "analytic"
        # Of the 4096 x 8 x 64 numbers, a rank sends one half to the other rank.
        assert max(estimate["matmul"], 2048 * 8 * 64 * 4 / 62.5) <= estimate["ring"] < estimate["keep"]
    assert {(s.decision.status, s.decision.reasons[0].code) for r in few for s in r.sites} == {("kept", "too_small")}

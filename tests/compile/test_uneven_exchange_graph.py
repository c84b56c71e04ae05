# SPDX-License-Identifier: Apache-2.0
"""The graphs of all-to-alls of uneven parts beside matmuls: golden graph, plans, refusals and the planner's choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.golden import check_golden
from tests.support.graph_text import waste
from tests.support.uneven_exchanges import Exchange
from tests.support.uneven_exchanges import by_counts
from tests.support.uneven_exchanges import by_sizes
from tests.support.uneven_exchanges import layer

SLOW = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-4, "matmul_flops": {"4": 4e10}})


@pytest.fixture(autouse=True)
def _scalars() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def _inputs(rows: int = 8, k: int = 16, n: int = 8) -> list[torch.Tensor]:
    return [torch.randn(s) for s in ((rows, k), (k, n), (n, k), (n,))]


def _found(function: Callable[..., Any], *inputs: Any, **fields: Any) -> OverlapReport:
    with torch.no_grad():
        return report_of(function, *inputs, **fields)


def _with_counts(function: Callable[..., torch.Tensor], rows: int = 8, **fields: Any) -> OverlapReport:
    """The report of ``function(exchange, x, w, v, bias)``."""

    def run(counts: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return function(by_counts(counts), *inputs)

    return _found(run, torch.tensor([rows - 3, 3]), *_inputs(rows), **fields)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the golden file is for torch 2.13")
def test_golden() -> None:
    """Both ranks have the golden graphs. The host reads as many sizes as without the rewrite."""
    texts = set()
    for rank in (0, 1):
        with fake_group(2, rank):
            inputs = [i.requires_grad_() for i in _inputs()]
            reports = reports_of(layer, "there and back", torch.tensor([5, 3]), *inputs)
        assert [text for r in reports for text in (*waste(r), *r.notices)] == []
        assert all(r.before.count("_local_scalar_dense") == r.after.count("_local_scalar_dense") for r in reports)
        texts.add("\n".join(f"{r.phase}\nbefore\n{r.before}\nafter\n{r.after}" for r in reports))
    (text,) = texts
    check_golden(text, "uneven_exchange.txt")


@pytest.mark.usefixtures("two")
def test_ranks_compare_no_number_of_rows() -> None:
    """The compared text holds neither symbols nor constants for the rows of a part."""
    steps = set()
    for sizes in (([3, 5], [3, 0]), ([1, 7], [1, 9])):
        report = _found(lambda x, w, *rest, sizes=sizes: by_sizes(*sizes)(x @ w), *_inputs())
        steps.add(tuple(json.loads(report.exchange)["steps"]))
        torch._dynamo.reset()
    how = "by ring/p2p (route=direct, sub_chunks=4)"
    assert steps == {(f"g0: all_to_all float32 [uneven, 8] in matmul_all_to_all {how}",)}
    report = _with_counts(lambda exchange, x, w, v, b: exchange(x) @ w)
    assert json.loads(report.exchange)["steps"] == [
        "g0: all_to_all int64 kept",
        f"g0: all_to_all float32 [uneven, 16] in all_to_all_matmul {how}",
    ]


@pytest.mark.usefixtures("two")
def test_the_matmul_after_the_exchange_is_overlapped_if_an_op_follows_the_matmul_before_it() -> None:
    report = _with_counts(lambda exchange, x, w, v, b: exchange((x @ w).relu()) @ v)
    assert summary(report) == [("all_to_all_matmul", 0, ["mm M"], "overlapped")]


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str, str]] = {
    "activation after the matmul": (
        lambda exchange, x, w, v, b: exchange((x @ w).relu()),
        "uneven_splits",
        "relu",
    ),
    "activation before the matmul": (
        lambda exchange, x, w, v, b: exchange(x).relu() @ w,
        "uneven_splits",
        "computed from parts",
    ),
    "columns": (
        lambda exchange, x, w, v, b: exchange((w.t() @ x.t()).t().contiguous()),
        "uneven_splits",
        "are not whole rows of mm",
    ),
    "equal pieces joined": (
        lambda exchange, x, w, v, b: torch.cat(by_sizes([3, 5], [3, 5])(x).chunk(2, 0), 1) @ torch.cat([w, w]),
        "layout",
        "a size of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("two")
def test_what_is_not_overlapped_has_a_reason(name: str) -> None:
    function, code, words = REFUSED[name]
    report = _with_counts(function)
    assert summary(report) == []
    found = [m.reason for m in report.near_misses if m.reason.code != "no_matmul"]
    assert [reason.code for reason in found] == [code] and words in found[0].text


@pytest.mark.usefixtures("two")
def test_a_sum_that_no_looping_op_computes_is_refused() -> None:
    """Only a looping op can send uneven parts."""
    report = _with_counts(lambda exchange, x, w, v, b: exchange(x @ w + x.sum()))
    (site,) = report.sites
    assert (site.decision.status, site.decision.reasons[0].code) == ("refused", "uneven_splits")


@pytest.mark.usefixtures("two")
def test_the_planner_estimates_from_the_rows_that_are_sent() -> None:
    def of(function: Callable[..., torch.Tensor], rows: int) -> list[tuple[str, str]]:
        torch._dynamo.reset()
        report = _with_counts(function, rows, schedule="auto", machine=SLOW)
        return [(s.decision.status, "".join(r.code for r in s.decision.reasons)) for s in report.sites]

    def sent(exchange: Exchange, x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return exchange(x @ torch.cat([w] * 128, 1))

    def received(exchange: Exchange, x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return exchange(x.repeat(1, 64)) @ w.repeat(64, 128)

    def returned(exchange: Exchange, x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return exchange(exchange(x).relu() @ w, back=True)

    assert of(received, 4096) == [("overlapped", "")] and of(received, 8) == [("kept", "too_small")]
    assert of(sent, 8) == [("kept", "too_small")]
    # The number of rows that arrive and are sent back is known only when the graph runs.
    assert of(returned, 4096) == [("kept", "dynamic_shape")]


@pytest.mark.usefixtures("two")
def test_an_exchange_without_a_matmul_is_a_near_miss() -> None:
    report = _found(
        lambda x: funcol.all_to_all_single(x, [3, 1], [3, 2], torch.distributed.group.WORLD), torch.randn(4, 2)
    )
    assert misses(report) == [("all_to_all", "no_matmul")]

# SPDX-License-Identifier: Apache-2.0
"""The rewritten graph has one text on all ranks, and a bounded number of nodes. Golden files hold rewritten graphs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.spellings import second_weight
from tests.support.spellings import weight
from tests.support.spellings import world
from tests.support.spellings import x3


def hand_made(kind: str, world_size: int) -> HandGraph:
    made = HandGraph()
    x, w = made.input(2, 2 * world_size, 16), made.input(16, 4 * world_size, name="w")
    rows = 4 * world_size
    if kind in ("gather", "gather inner dim"):
        gathered = made.gather(x) if kind == "gather" else made.gather_on(x, 1)
        return made.output(made.mm(made.view(gathered, rows * world_size, 16), w))
    y = made.mm(made.view(x, rows, 16), w)
    if kind in ("scatter inner dim", "scatter hidden", "reduce"):
        y = made.view(y, 2, 2 * world_size, 4 * world_size)
    result: fx.Node = {
        "scatter": lambda: made.scatter(y),
        "scatter inner dim": lambda: made.scatter_on(y, 1),
        "scatter hidden": lambda: made.scatter_on(y, 2),
        "reduce": lambda: made.reduce(y),
        "head": lambda: made.gather(y),
    }[kind]()
    return made.output(result)


def test_one_text_for_ranks_with_different_device_numbers() -> None:
    """``cuda:1`` in a node's arguments would be a rank number in the graph."""
    texts = set()
    for rank in (0, 3):
        with fake_group(4, rank):
            made = HandGraph()
            x, w = (
                made.on(f"cuda:{rank}", 4096, 1024, dtype=torch.bfloat16),
                made.on(f"cuda:{rank}", 1024, 512, dtype=torch.bfloat16, name="w"),
            )
            y = made.mm(made.gather(x), w)
            report = made.output(y, made.reduce(made.mm(x, w))).run()
            assert [s.decision.status for s in report.sites] == ["overlapped"] * 2, report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
            assert "cuda" not in report.after
    assert len(texts) == 1


HAND_MADE = ["gather", "gather inner dim", "scatter", "scatter inner dim", "scatter hidden", "reduce", "head"]


@pytest.mark.parametrize("kind", HAND_MADE)
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.thorough), 8, pytest.param(64, marks=pytest.mark.thorough)]
)
def test_ranks_have_one_text(kind: str, world_size: int) -> None:
    """No graph holds a rank number. If graphs held rank numbers, ranks would compile different code, and could hang."""
    texts = set()
    for rank in sorted({0, 1, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            report = hand_made(kind, world_size).run(sub_chunks=2 if world_size < 64 else 1)
            assert [s.decision.status for s in report.sites] == ["overlapped"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


@pytest.mark.parametrize("world_size", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_ranks_have_one_text_when_traced(world_size: int) -> None:
    """Tracing by Dynamo must not put the rank into the text either."""
    texts = set()
    for rank in (0, world_size - 1):
        with fake_group(world_size, rank), torch.no_grad():

            def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return reduce_scatter((all_gather(x, 1, world()) @ w).relu() @ v, "sum", 1, world())

            texts.add(report_of(fn, x3(), weight(), second_weight()).to_json(graphs=True))
    assert len(texts) == 1


OPS = {
    "gather": "all_gather_matmul",
    "scatter": "matmul_reduce_scatter",
    "reduce": "matmul_all_reduce",
    "head": "matmul_all_gather",
}


@pytest.mark.parametrize("kind", HAND_MADE)
def test_node_count_is_bounded_in_a_large_world(kind: str) -> None:
    """Unrolled steps of 1024 ranks would be thousands of nodes per site. The site must still be overlapped."""
    with fake_group(1024, 77):
        made = hand_made(kind, 1024)
        before = len(made.graph.nodes)
        report = made.run()
        after = len(made.graph.nodes)
    assert [s.decision.status for s in report.sites] == ["overlapped"]
    assert kind == "head" or f"overlap_inductor.{OPS[kind.split()[0]]}.default" in report.after
    assert after <= before + 32


def golden(report: OverlapReport) -> str:
    return f"{report.before}----\n{report.after}"


def test_gather_golden() -> None:
    """Each of the two matmuls reads a view of the gathered shards. The shards are not copied."""
    with fake_group(2):
        check_golden(golden(hand_made("gather", 2).run(sub_chunks=1)), "one_text/gather.txt")


def test_gather_on_an_inner_dim_in_parts_golden() -> None:
    with fake_group(3, 1):
        check_golden(
            golden(hand_made("gather inner dim", 3).run(sub_chunks=2)), "one_text/gather_on_an_inner_dim_in_parts.txt"
        )


def test_scatter_golden() -> None:
    """Each partial sum is sent before the next matmul. The rank's own slice is multiplied last. Then all partial
    sums are added, in fp32."""
    with fake_group(2):
        check_golden(golden(hand_made("scatter inner dim", 2).run(sub_chunks=1)), "one_text/scatter.txt")


def test_travelling_accumulator_golden() -> None:
    """With ``allow_hop_rounding``, an accumulator visits every rank once."""
    with fake_group(3):
        check_golden(
            golden(hand_made("scatter", 3).run(sub_chunks=1, numerics="allow_hop_rounding")),
            "one_text/travelling_accumulator.txt",
        )


def test_reduce_golden() -> None:
    """A rank sums its slice of a band as soon as it has multiplied the slice. The sum of the first band is broadcast
    under the matmuls of the second band."""
    with fake_group(2):
        check_golden(golden(hand_made("reduce", 2).run(sub_chunks=2)), "one_text/reduce.txt")


def test_head_golden() -> None:
    """Each band of rows is sent to all ranks."""
    with fake_group(2):
        check_golden(golden(hand_made("head", 2).run(sub_chunks=2)), "one_text/head.txt")


def test_looping_golden() -> None:
    """A site whose steps do not fit the budget is one op."""
    with fake_group(2):
        check_golden(hand_made("gather", 2).run(step_node_budget=1).after, "one_text/looping.txt")

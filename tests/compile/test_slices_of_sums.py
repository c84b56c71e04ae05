# SPDX-License-Identifier: Apache-2.0
"""A slice of a sum of matmuls: each further matmul adds to the result of the one before, if this computes the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.compile.readings import facts
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

ROWS = 4
Sum = Callable[[HandGraph, fx.Node, fx.Node, fx.Node], fx.Node]


def add(made: HandGraph, *terms: Any, **kwargs: Any) -> fx.Node:
    return made.call(aten.add.Tensor, *terms, **kwargs)


def products(made: HandGraph, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> list[fx.Node]:
    """``mm`` of different operands. Each has its own length of the contracted dim."""
    return [
        made.mm(made.input(ROWS, k, dtype=d, name=f"x{k}"), made.input(k, 8, dtype=d, name=f"w{k}"))
        for k, d in zip((16, 24, 32), dtypes, strict=True)
    ]


def ops(made: HandGraph, total: fx.Node) -> dict[str, int]:
    """How many ops of each name have a slice of 2 of the 4 rows as result, after the rewrite. Two ranks have two such
    slices. The addition of the received partial sum counts as an ``add``."""
    report = made.output(made.scatter(total)).run(sub_chunks=1)
    assert [(f[0], f[2]) for f in facts(report)] == [("matmul_reduce_scatter", "overlapped")]
    return dict(Counter(re.findall(r"\w+\[(?:1, )?2, 8\] = aten\.(mm|addmm|add|relu)\.", report.after)))


def in_3d(made: HandGraph, *terms: fx.Node) -> list[fx.Node]:
    return [made.view(t, 1, ROWS, 8) for t in terms]


def backward_of_3d_linears(made: HandGraph, a: fx.Node, b: fx.Node, c: fx.Node) -> fx.Node:
    a, b, c = in_3d(made, a, b, c)
    return made.view(add(made, add(made, a, b), c), ROWS, 8)


@pytest.mark.parametrize(
    "total",
    [
        lambda made, a, b, c: add(made, add(made, a, b), c),
        lambda made, a, b, c: add(made, a, add(made, b, c)),
        backward_of_3d_linears,
    ],
    ids=["left first", "right first", "views between"],
)
def test_three_matmuls_need_no_addition(total: Sum) -> None:
    with fake_group(2):
        made = HandGraph()
        found = ops(made, total(made, *products(made)))
    assert found == {"mm": 2, "addmm": 4, "add": 1}


def test_a_result_that_is_added_to_itself_is_computed_once() -> None:
    with fake_group(2):
        made = HandGraph()
        a, b, c = products(made)
        twice = add(made, a, a)
        found = ops(made, twice)
    assert found == {"mm": 2, "add": 3}


def test_only_a_matmul_takes_another_one_on() -> None:
    """An activation's result is added by a pointwise op: Inductor computes activation and addition in one kernel."""
    with fake_group(2):
        made = HandGraph()
        a, b, c = products(made)
        found = ops(made, add(made, add(made, made.call(aten.relu.default, a), b), made.call(aten.relu.default, c)))
    assert found == {"mm": 6, "relu": 4, "add": 5}


@pytest.mark.parametrize(
    "total",
    [
        lambda made, a, b: add(made, a, b, alpha=2),
        lambda made, a, b: add(made, a, made.call(aten.mul.Tensor, b, 2)),
        lambda made, a, b: add(made, a, made.input(8, name="row")),
        lambda made, a, b: add(made, a, 1),
        lambda made, a, b: made.call(aten.sub.Tensor, a, b),
    ],
    ids=["alpha", "scaled", "broadcast", "number", "difference"],
)
def test_other_sums_stay(total: Callable[..., fx.Node]) -> None:
    with fake_group(2):
        made = HandGraph()
        a, b, _ = products(made)
        found = ops(made, total(made, a, b))
    assert "addmm" not in found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_matmuls_of_different_dtypes_are_added_in_the_wider_one(order: tuple[int, int]) -> None:
    """``addmm`` takes one dtype only. The sum of a bf16 and an fp32 matmul has dtype fp32."""
    with fake_group(2):
        made = HandGraph()
        terms = products(made, (torch.bfloat16, torch.float32, torch.float32))
        found = ops(made, add(made, *(terms[i] for i in order)))
    assert found == {"mm": 4, "add": 3}


def test_a_dynamic_number_of_rows_adds_no_guard() -> None:
    with fake_group(2):
        made = HandGraph()
        x = made.input(16, 16, dynamic=[0])
        rows = x.meta["val"].shape[0]
        y = made.call(aten.relu.default, x)
        terms = [made.mm(n, made.input(16, 8, name=f"w{i}")) for i, n in enumerate((x, y))]
        before = len(made.shapes.guards)
        report = made.output(made.reduce(add(made, *terms))).run(sub_chunks=1)
    assert facts(report) == [("matmul_all_reduce", ["mm M", "mm M"], "overlapped")]
    assert "aten.addmm" in report.after and len(made.shapes.guards) == before and isinstance(rows, torch.SymInt)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_wrap_around_alike(dtype: torch.dtype) -> None:
    """torch's ``addmm`` of integers is ``mm`` and an addition, also if a sum is too large for the dtype."""
    torch.manual_seed(0)
    x, w, y, v = (torch.randint(0, 100, (9, 9)).to(dtype) for _ in range(4))
    assert torch.equal(torch.addmm(x @ w, y, v), x @ w + y @ v)

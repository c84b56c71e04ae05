# SPDX-License-Identifier: Apache-2.0
"""int8 matmuls on a GPU need more than 16 rows, and multiples of 8 in the other sizes. So a piece may be too small
although the whole matmul is large enough."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten


def _int8(made: HandGraph, rows: int, columns: int, name: str) -> fx.Node:
    return made.on("cuda:0", rows, columns, dtype=torch.int8, name=name)


def _multiplied(made: HandGraph, x: fx.Node, rows: int) -> fx.Node:
    return made.call(aten._int_mm.default, x, _int8(made, rows, 64, "w"))


def _reduced(rows: int) -> Callable[[HandGraph], fx.Node]:
    return lambda made: made.reduce(_multiplied(made, _int8(made, rows, 64, "x"), 64))


def _scattered(rows: int) -> Callable[[HandGraph], fx.Node]:
    return lambda made: made.scatter(_multiplied(made, _int8(made, rows, 64, "x"), 64))


def _columns_gathered(rows: int) -> Callable[[HandGraph], fx.Node]:
    return lambda made: _multiplied(made, made.gather_on(_int8(made, rows, 64, "x"), 1), 128)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (_reduced(128), "overlapped"),
        (_reduced(129), "refused"),
        (_reduced(64), "refused"),
        (_scattered(128), "overlapped"),
        (_scattered(64), "refused"),
        (_columns_gathered(34), "overlapped"),
        (_columns_gathered(32), "refused"),
    ],
    ids=["rows", "a row left over", "few rows", "rows scattered", "few scattered", "sub-chunks of rows", "of few rows"],
)
def test_pieces_are_large_enough(program: Callable[[HandGraph], fx.Node], status: str) -> None:
    """Each shard has two sub-chunks, each of which must have more than 16 rows. With 129 rows on two ranks, one row is
    left over, and must not be multiplied alone. If columns are gathered, a sub-chunk has half of the rows."""
    with fake_group(2):
        made = HandGraph()
        (site,) = made.output(program(made)).run(sub_chunks=2).sites
    reasons = [r.code for r in site.decision.reasons]
    assert (site.decision.status, reasons) == (status, ["schedule_not_available"] if status == "refused" else reasons)

# SPDX-License-Identifier: Apache-2.0
"""The text of a graph's exchange is equal on all ranks, even if the ranks' graphs differ in ways that do not change
what is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.torch_compat.functional_collectives import all_gather
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten


def _steps(function: Callable[..., Any]) -> list[str]:
    """The steps of the exchange of ``function``. In ``function``, pointwise ops must stand between a gather and its
    matmul. A looping op computes these ops on shards."""
    with fake_group(3):
        (report,) = reports_of(function, torch.randn(6, 4), torch.randn(12, 8), step_node_budget=1)
    steps: list[str] = json.loads(report.exchange)["steps"]
    assert len(steps) == 1 and " behind " in steps[0] and "all_gather_matmul" in steps[0]
    return steps


def _gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(all_gather(x, 1, dist.group.WORLD) * 2) @ w


def test_ops_that_are_computed_before_sending_are_named_in_graph_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a set of nodes may differ between processes. The text must not depend on this order."""
    between, texts = GatherNodes.between, []
    for reverse in (False, True):
        monkeypatch.setattr(
            GatherNodes, "between", lambda nodes, reverse=reverse: sorted(between(nodes), reverse=reverse)
        )
        texts.append(_steps(_gathered))
    assert texts[0] == texts[1]


def _line(made: HandGraph, result: Any) -> str:
    report = made.output(result).run()
    assert [s.decision.status for s in report.sites] == ["overlapped"]
    (step,) = json.loads(report.exchange)["steps"]
    return str(step)


def test_symbols_of_reordered_dims_are_named_alike() -> None:
    """Ranks may number their symbols differently. So the text names the sizes of a transposed result without
    symbols."""
    lines = []
    with fake_group(2):
        for others in (0, 2):
            made = HandGraph()
            for i in range(others):
                made.input(5 + i, 3, dynamic=(0,), name=f"other{i}")
            x, w = made.input(6, 4, dynamic=(0,)), made.input(4, 8, name="w")
            lines.append(_line(made, made.reduce(made.call(aten.permute.default, made.mm(x, w), [1, 0]))))
    assert lines[0] == lines[1] and "in order [1, 0] of [d0, 8]" in lines[0]


@pytest.mark.parametrize("splits", [False, True], ids=["one dim", "split dims"])
def test_the_order_is_named_if_a_dim_other_than_the_first_is_scattered(splits: bool) -> None:
    """The text names the order of the dims. A rank's graph may split the columns into several dims, which must not
    change the text."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(6 * 4, 16), made.input(16, 8, name="w"))
        if splits:
            y = made.view(made.call(aten.mul.Tensor, made.view(y, 24, 2, 4), made.input(24, 2, 4, name="s")), 24, 8)
        line = _line(made, made.scatter_on(made.view(y, 6, 4, 8), 1))
    assert line.split(" in matmul")[0].endswith("in order [1, 0, 2] of [6, 2, 16]")

"""What a graph exchanges is written alike on all ranks, whatever else their graphs hold and in which order they look
at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.passes import exchange_steps
from tests.fake_group import all_gather
from tests.fake_group import fake_group
from tests.fake_group import reports_of


def _steps(function: Callable[..., Any]) -> list[str]:
    """Of a gather with pointwise ops before its matmul, by a looping op, which computes them on shards."""
    with fake_group(3):
        (report,) = reports_of(function, torch.randn(6, 4), torch.randn(12, 8), step_node_budget=1)
    steps: list[str] = json.loads(report.exchange)["steps"]
    assert len(steps) == 1 and " behind " in steps[0] and "all_gather_matmul" in steps[0]
    return steps


def _gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(all_gather(x, 1, dist.group.WORLD) * 2) @ w


def test_what_is_computed_before_sending_is_named_in_graph_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of nodes has another order in every process."""
    between, texts = exchange_steps.between, []
    for reverse in (False, True):
        monkeypatch.setattr(
            exchange_steps, "between", lambda nodes, reverse=reverse: sorted(between(nodes), reverse=reverse)
        )
        texts.append(_steps(_gathered))
    assert texts[0] == texts[1]

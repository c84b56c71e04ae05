# SPDX-License-Identifier: Apache-2.0
"""A norm's weight that differs between the ranks: the graph whose tokens were divided would compute something else, so
all ranks run the plain program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.errors import OverlapError
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard
from tests.support.sequence_blocks import ReduceForward
from tests.support.sequence_blocks import rms_norm

H = 16


def _layer(x: torch.Tensor, a: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, b: torch.Tensor) -> Any:
    """A row-wise layer, a residual, a norm and a column-wise layer."""
    x = residual + all_reduce(x @ a, "sum", dist.group.WORLD)
    return rms_norm(x, norm) @ b, x


def _inputs(rank: int, differ: bool) -> list[torch.Tensor]:
    own, same = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100)
    norm = torch.rand(H, generator=own if differ else same)
    x, a, b = (torch.randn(s, generator=own) for s in ((9, 8), (8, H), (H, 12)))
    return [x, a, torch.randn(9, H, generator=same), norm, b]


def _calls(rank: int, world_size: int, schedule: str, differ: bool) -> dict[str, Any]:
    compile_anew()
    heard, inputs = Heard(), _inputs(rank, differ)
    expected = _layer(*inputs)
    with overlap_inductor.overlap(schedule=schedule, sequence_parallel="on"):
        compiled = torch.compile(_layer, dynamic=False)
        results = [compiled(*inputs) for _ in range(2)]
    report = overlap_inductor.last_report()
    assert report is not None
    return {
        "worst": max((a - b).abs().max().item() for one in results for a, b in zip(one, expected, strict=True)),
        "status": [s.status for s in report.stretches],
        "overlapped": sum(s.decision.status == "overlapped" for s in report.sites),
        "texts": report.notices + heard.texts,
    }


@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_all_ranks_run_the_plain_program(schedule: str) -> None:
    """With ``auto``, nothing of this small graph is overlapped. It is still not the plain program."""
    for result in run_ranks(2, _calls, schedule, True):
        assert result["worst"] < 1e-4 and result["status"] == ["rewritten"], result
        assert bool(result["overlapped"]) == (schedule == "ring")
        assert any("are not those of the first rank" in text for text in result["texts"]), result


def test_the_rewritten_graph_runs_if_the_inputs_are_the_same() -> None:
    for result in run_ranks(2, _calls, "ring", False):
        assert result["worst"] < 1e-4 and result["status"] == ["rewritten"] and result["texts"] == [], result


def _train(rank: int, world_size: int) -> str:
    compile_anew()
    inputs = [t.requires_grad_() for t in _inputs(rank, True)]

    def layer(*args: torch.Tensor) -> torch.Tensor:
        x, a, residual, norm, b = args
        return rms_norm(residual + ReduceForward.apply(x @ a), norm) @ b

    with overlap_inductor.overlap(schedule="ring", sequence_parallel="on"):
        try:
            torch.compile(layer, dynamic=False)(*inputs)
        except OverlapError as error:
            return str(error)
    return ""


def test_a_training_graph_has_no_plain_program() -> None:
    """What its forward saves for its backward was changed. So all ranks raise, and the error names the switch."""
    texts = run_ranks(2, _train)
    assert all("OVERLAP_INDUCTOR_SEQUENCE_PARALLEL=off" in text for text in texts), texts

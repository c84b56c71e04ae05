# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite in graphs that hold other graphs, and in the two halves of a training graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlap_inductor
from overlap_inductor.report import publish
from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.sequence_blocks import ReduceForward
from tests.support.sequence_blocks import rms_norm


def _layer(x: torch.Tensor, a: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, b: torch.Tensor) -> Any:
    residual = residual + ReduceForward.apply(x @ a)
    return rms_norm(residual, norm) @ b, residual


def _reports(fn: Any, trains: bool) -> list[OverlapReport]:
    publish.forget_reports()
    shapes = ((8, 8), (8, 16), (8, 16), (16,), (16, 8))
    # Generated code calls ATen for each op, because building a C++ kernel takes a second.
    anew = torch._inductor.config.patch(fx_graph_cache=False, fallback_by_default=True)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with anew, uncached, fake_group(2), overlap_inductor.overlap(schedule="ring", sequence_parallel="on"):
        out, kept = torch.compile(fn, dynamic=False)(*(torch.randn(s).requires_grad_(trains) for s in shapes))
        if trains:
            (out.sum() + kept.sum()).backward()
    return publish.all_reports()


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_nested_compile_region_is_not_rewritten(trains: bool) -> None:
    """Ranks cannot compare the inputs of a region, and a region has no plain program."""
    region = torch.compiler.nested_compile_region(_layer)

    # Two calls, because torch 2.13 inlines a region that is called once.
    def twice(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        x, residual = region(x * 2, *weights)
        return region(x, weights[0], residual, *weights[2:])

    if trains and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 cannot trace the second call of a region that holds an autograd function")
    found = [s for r in _reports(twice, trains) for s in r.stretches]
    assert found and all(s.status == "refused" for s in found)
    (reason,) = found[0].reasons
    assert reason.code == "backend_not_supported" and "nested compile region" in reason.text


def test_the_forward_holds_no_gather_that_only_the_backward_reads() -> None:
    """The norm's gradient needs the norm's input. For this, the forward saves only this rank's rows of the input,
    and the backward gathers them."""
    forward, backward = _reports(_layer, True)
    assert [s.status for s in forward.stretches] == ["rewritten"]
    assert "overlap_inductor.gather_start" in backward.after
    gathers = [line for line in forward.before.splitlines() if "all_gather_into_tensor.default" in line]
    waits = [line.split(":")[0] for line in forward.before.splitlines() if "wait_tensor.default" in line]
    assert gathers and all(forward.before.count(name) > 1 for name in waits), forward.before

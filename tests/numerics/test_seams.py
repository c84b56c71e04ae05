# SPDX-License-Identifier: Apache-2.0
"""A scatter and the gather behind it run in bands. The results must agree with eager PyTorch in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from overlap_inductor.report import publish as reporting
from tests.support import reduced_blocks
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks

TOKENS = 48
LIMIT = 1e-5


def _trained(model: torch.nn.Module, called: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    result = called(x)
    result.square().mean().backward()
    gradients = [t.grad for t in (x, *model.parameters())]
    return [result.detach(), *(g for g in gradients if g is not None)]


def _run(rank: int, world_size: int, kernels: bool, sub_chunks: int) -> tuple[float, list[bool]]:
    """Returns the largest error, and one bool for each graph with a seam: whether the gather of a band begins before
    the last wait of the scatter."""
    compile_anew(kernels)
    model, x = reduced_blocks.Layers(4), reduced_blocks.input_of(TOKENS, reduced_blocks.HIDDEN)
    exact_model = copy.deepcopy(model).double()
    options = {"schedule": "ring", "sequence_parallel": "on", "sub_chunks": sub_chunks}
    found = _trained(model, torch.compile(model, backend="overlap_inductor", options=options), x)
    exact = _trained(exact_model, exact_model, x.double())
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)]
    error = float(torch.stack(errors).max())  # Python's ``max`` may lose a NaN
    early = []
    assert any(s.decision.moving.parameters.get("chained") for r in reporting.all_reports() for s in r.sites)
    for report in reporting.all_reports():
        seams = [s for s in report.sites if "bands" in s.decision.moving.parameters]
        if not seams:
            continue
        lines = report.after.splitlines()
        send = next(i for i, line in enumerate(lines) if "exchange_send" in line and "'broadcast'" in line)
        scatter = seams[0].facts.id
        wait = max(i for i, line in enumerate(lines) if "exchange_wait" in line and f"'{scatter}'" in line)
        early.append(send < wait)
    return error, early


@pytest.mark.parametrize(
    ("world_size", "kernels", "sub_chunks"),
    [
        (2, False, 4),
        pytest.param(2, False, 2, marks=pytest.mark.thorough),
        pytest.param(2, True, 4, marks=pytest.mark.thorough),
        pytest.param(3, False, 4, marks=pytest.mark.thorough),
        (4, False, 4),
    ],
)
def test_training_in_bands(world_size: int, kernels: bool, sub_chunks: int) -> None:
    """Ops must read the rows of the right band, and only after the band has arrived. The gather of a band must begin
    before the scatter of the last band has ended."""
    for error, early in run_ranks(world_size, _run, kernels, sub_chunks, timeout=300):
        assert error < LIMIT
        assert early and all(early), early

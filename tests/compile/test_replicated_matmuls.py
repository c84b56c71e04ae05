# SPDX-License-Identifier: Apache-2.0
"""Narrow matmuls with weights that are whole on every rank are computed on rows, if fewer bytes are then gathered."""

from __future__ import annotations

import re

import pytest
import torch

from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.latent_projections import HIDDEN
from tests.support.latent_projections import LATENT
from tests.support.latent_projections import LatentProjections
from tests.support.latent_projections import sharded

GATHER = re.compile(r"all_gather_into_tensor\S*: float32\[(\d+), (\d+)\]")
X = (8, HIDDEN)


def gathered(fn: torch.nn.Module, x: torch.Tensor) -> list[int]:
    """The widths of the gathered tensors, in graph order."""
    report = report_of(fn, x, sequence_parallel="on")
    (stretch,) = report.stretches
    assert stretch.status == "rewritten", stretch
    return [int(width) for _, width in GATHER.findall(report.before)]


@pytest.mark.parametrize("shape", [X, (1, *X), (2, *X), (7, HIDDEN)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_results_of_narrow_matmuls_are_gathered(shape: tuple[int, ...], bias: bool) -> None:
    with fake_group(2), torch.no_grad():
        assert gathered(sharded(bias=bias), torch.randn(shape)) == [8, 6]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"direct": True}, "the input is gathered for another matmul"),
        ({"latent": (20, 12)}, "the results are as wide as the input"),
    ],
)
def test_the_input_is_gathered(options: dict[str, object], why: str) -> None:
    with fake_group(2), torch.no_grad():
        assert gathered(sharded(**options), torch.randn(X)) == [HIDDEN], why


def test_plain_weights_beside_no_shards_may_be_shards() -> None:
    """Hand-written tensor parallelism holds a rank's shards as plain tensors."""

    class Local(torch.nn.Module):
        def __init__(self, model: LatentProjections) -> None:
            super().__init__()
            self.down, self.norm = model.down, model.norm
            self.first = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x + all_reduce(x @ self.first, "sum", torch.distributed.group.WORLD))
            return torch.cat([down(y) for down in self.down], -1)

    with fake_group(2), torch.no_grad():
        assert gathered(Local(LatentProjections()), torch.randn(X)) == [HIDDEN]


def test_training_gathers_the_input() -> None:
    """The gradient of the whole weight sums over all tokens of the input."""
    with fake_group(2):
        reports = reports_of(sharded(), torch.randn(X, requires_grad=True), sequence_parallel="on")
    widths = [int(width) for r in reports if r.phase == "forward" for _, width in GATHER.findall(r.before)]
    assert HIDDEN in widths and not set(LATENT) & set(widths)

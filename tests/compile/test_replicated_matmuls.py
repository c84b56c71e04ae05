# SPDX-License-Identifier: Apache-2.0
"""Narrow matmuls with weights that are whole on every rank are computed on rows, if fewer bytes are then gathered."""

from __future__ import annotations

import re
from collections.abc import Callable

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


class _Beside(torch.nn.Module):
    """``change`` adds to the sum of ``sharded()`` something that reads its input and plain parameters."""

    def __init__(self, change: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.model, self.change = sharded(), change
        self.plain = torch.nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) + self.change(x, self.plain)[..., :1]


def test_plain_shards_beside_dtensors() -> None:
    """A plain parameter is read by a matmul whose result is all-reduced, so plain parameters are shards here."""

    def change(x: torch.Tensor, plain: torch.nn.Parameter) -> torch.Tensor:
        return all_reduce(x @ plain, "sum", torch.distributed.group.WORLD)

    with fake_group(2), torch.no_grad():
        report = report_of(_Beside(change, HIDDEN, 4), torch.randn(X), sequence_parallel="on")
        widths = {int(width) for _, width in GATHER.findall(report.before)}
        assert any(s.status == "rewritten" for s in report.stretches)
        assert HIDDEN in widths and not widths & set(LATENT)


def test_a_bias_with_a_row_for_each_token() -> None:
    """Its rows would have to be cut. The input is gathered, and the rewrite does not fail."""

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.norm = sharded(), torch.nn.RMSNorm(HIDDEN, eps=1e-6)
            self.bias = torch.nn.Parameter(torch.randn(X[0], 4))
            self.narrow = torch.nn.Parameter(torch.randn(HIDDEN, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x + self.model.first(x))
            return torch.addmm(self.bias, y, self.narrow)

    with fake_group(2), torch.no_grad():
        assert gathered(Biased(), torch.randn(X)) == [HIDDEN]


@pytest.mark.parametrize("frozen", [False, True])
def test_training_gathers_the_input(frozen: bool) -> None:
    """The gradient of the whole weight sums over all tokens of the input. A frozen weight has no gradient, but a
    graph with a backward has no plain program, so no weight is taken for whole."""
    with fake_group(2):
        model = sharded()
        model.down.requires_grad_(not frozen)
        reports = reports_of(model, torch.randn(X, requires_grad=True), sequence_parallel="on")
    widths = [int(width) for r in reports if r.phase == "forward" for _, width in GATHER.findall(r.before)]
    assert HIDDEN in widths and not set(LATENT) & set(widths)

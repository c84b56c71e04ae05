# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut to rows before their elementwise ops (``passes.sequence.early_cuts``)."""

from __future__ import annotations

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.interpreted import interpreted
from tests.support.sequence_blocks import ReduceBackward
from tests.support.sequence_blocks import ReduceForward


def _square() -> torch.Tensor:
    return torch.randn(16, 16, requires_grad=True)


def _divided(x: torch.Tensor, d: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scale = (torch.arange(16, dtype=torch.int32) + 1) // d
    return ReduceForward.apply(ReduceBackward.apply(x * scale.float()) @ w @ v)


def test_integers_are_not_divided_by_the_zeros_of_padding() -> None:
    """7 tokens on 2 ranks: rank 1 has a row of padding. A division of integers by zero raises an error.

    The values of the gradient are not checked, because the collectives of a fake group leave their results unwritten.
    """
    with fake_group(2, 1):
        x, d = torch.randn(7, 16, requires_grad=True), torch.ones(7, 1, dtype=torch.int32)
        reports: list[OverlapReport] = []
        backend = interpreted(OverlapConfig(schedule="ring", sequence_parallel="on"), reports)
        torch.compile(_divided, backend=backend)(x, d, _square(), _square()).sum().backward()
    assert [s.status for r in reports for s in r.stretches][-1] == "rewritten"
    assert x.grad is not None


def test_many_elementwise_ops_in_a_row() -> None:
    """The cut in front of so many ops must not exceed Python's recursion limit."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for number in range(250):
            x = x.sin() if number % 2 else x.cos()
        return ReduceForward.apply(ReduceBackward.apply(x) @ w @ v)

    with fake_group(2):
        reports = reports_of(fn, torch.randn(8, 16, requires_grad=True), _square(), _square(), sequence_parallel="on")
    assert [s.status for r in reports for s in r.stretches][-1] == "rewritten"
    assert [f for r in reports for f in r.failures] == []

# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite of batches whose number of sequences the ranks do not divide.

Between a matmul and its collective, rows must not be viewed as ``[B, S, H]``. Such a view splits the dim of the ranks,
and then the finders take no site."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.sequence_blocks import ReduceBackward
from tests.support.sequence_blocks import ReduceForward
from tests.support.sequence_blocks import reduced

HIDDEN, INNER = 16, 32


def _blocks(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Two gated MLPs. Between their all-reduces stand a residual add and a norm, forward and backward. In the backward,
    the all-reduce adds up the gradients of two matmuls."""
    for gate, up, bias, down in zip(weights[::4], weights[1::4], weights[2::4], weights[3::4], strict=True):
        entered = ReduceBackward.apply(F.layer_norm(x, (HIDDEN,)))
        x = x + ReduceForward.apply(F.linear(F.silu(F.linear(entered, gate)) * F.linear(entered, up, bias), down))
    return x


@pytest.mark.parametrize(("sequences", "ranks"), [(2, 4), (3, 2), (6, 4), (2, 8), (1, 4), (4, 4)])
def test_each_collective_beside_a_matmul_is_overlapped(sequences: int, ranks: int) -> None:
    with fake_group(ranks):
        x = torch.randn(sequences, 8, HIDDEN, requires_grad=True)
        shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (INNER,), (HIDDEN, INNER)] * 2
        weights = [torch.randn(s, requires_grad=True) for s in shapes]
        reports = reports_of(_blocks, x, *weights, sequence_parallel="on")
    for report in reports:
        found = Counter(site.facts.pattern for site in report.sites if site.decision.status == "overlapped")
        assert found == {"matmul_reduce_scatter": 2, "all_gather_matmul": 1}, report.phase
        # The last gather of each graph gives one of its results.
        assert [miss.collective.kind for miss in report.near_misses] == ["all_gather"]
    assert [r.phase for r in reports] == ["forward", "backward"]


def test_a_dynamic_number_of_sequences() -> None:
    """The sum of two gradients is overlapped although the number of sequences is a symbol."""
    with fake_group(4):
        x = torch.randn(6, 8, HIDDEN, requires_grad=True)
        shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (INNER,), (HIDDEN, INNER)] * 2
        weights = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
        reports = reports_of(_blocks, x, *weights, sequence_parallel="on", dynamic=True)
    for report in reports:
        found = Counter(site.facts.pattern for site in report.sites if site.decision.status == "overlapped")
        assert found["matmul_reduce_scatter"] == 2, report.phase
    assert [r.phase for r in reports] == ["forward", "backward"]


def _reduced_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(reduced(reduced(x @ weight) + x), (HIDDEN,)) @ weight


@pytest.mark.parametrize("sequences", [2, 4])
def test_a_sum_of_rows_that_is_reduced_again(sequences: int) -> None:
    """The sum is gathered for the second all-reduce. It is not taken apart, which would leave its gather unread."""
    with fake_group(4):
        x, weight = torch.randn(sequences, 8, HIDDEN), torch.randn(HIDDEN, HIDDEN)
        (report,) = reports_of(_reduced_twice, x, weight, sequence_parallel="on")
    # The gather of the sum and the second all-reduce's exchange have no matmul. A ring has no such waits.
    assert report.after.count("_c10d_functional.wait_tensor") == 2

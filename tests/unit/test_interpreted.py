# SPDX-License-Identifier: Apache-2.0
"""The interpreter that takes the place of Inductor in tests returns what generated code returns."""

from __future__ import annotations

import torch
from torch import fx

from tests.support.interpreted import _call_of


def test_results_are_no_views_for_autograd() -> None:
    """Two results share the memory of one tensor. A caller may write to one of them."""

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled = torch.ops.aten.mul.Tensor(x, 2)
        return torch.ops.aten.slice.Tensor(doubled, 0, 0, 2), torch.ops.aten.slice.Tensor(doubled, 0, 2, 4), x

    x = torch.arange(4.0)
    first, second, same = _call_of(fx.symbolic_trace(halves))([x])
    assert not first._is_view() and not second._is_view() and same is x
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.tolist() == [0, 2] and second.tolist() == [4, 6]


def test_a_conjugate_result_stays_conjugate() -> None:
    """A backward graph may read the conjugate of a complex tensor. PyTorch keeps it as a view with a bit set."""

    def conjugate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.aten._conj.default(torch.ops.aten.mul.Tensor(x, 2)),)

    (found,) = _call_of(fx.symbolic_trace(conjugate))([torch.tensor([1 + 2j])])
    assert not found._is_view() and found.tolist() == [2 - 4j]

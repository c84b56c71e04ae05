# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls of experts, in Triton's interpreter, against a loop over experts in fp32."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.lowerings.chunked.grouped_ops import Tiles
from overlap_inductor.lowerings.chunked.grouped_ops import kernel
from overlap_inductor.lowerings.chunked.grouped_ops import prepared

SMALL = Tiles(16, 16, 16, 1, group=2, warps=1)
ENDS = {
    "even": [16, 32, 48],
    "uneven": [5, 22, 70],
    "an expert without rows": [0, 33, 33, 50],
    "all rows to one of five": [0, 0, 61, 61, 61],
    "one expert": [37],
    "no rows": [0, 0],
    "rows behind the last end": [9, 20],
}
BEHIND = 7


def _given(ends: list[int], inner: int, columns: int, count: int, transposed: bool) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(len(ends))
    x = torch.randn(ends[-1] + BEHIND, inner, generator=drawn).half()
    weights = [(torch.randn(len(ends), inner, columns, generator=drawn) / inner**0.5).half() for _ in range(count)]
    if transposed:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    return x, torch.tensor(ends, dtype=torch.int32), *weights


def _two(weights: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What a launch passes for one or two weights."""
    return [*weights, *[None] * (2 - len(weights))]


def _expected(x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    starts = [0, *ends.tolist()]
    products = []
    for w in weights:
        parts = [x[starts[e] : starts[e + 1]].float() @ w[e].float() for e in range(len(ends))]
        products.append(torch.cat(parts).half())
    if len(products) == 1:
        return products[0]
    return torch.nn.functional.silu(products[0]) * products[1]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", ENDS)
def test_is_a_matmul_for_each_expert(case: str, count: int, transposed: bool) -> None:
    """The second launch has other numbers of rows. Rows behind the last end are not written."""
    inner, columns = 32, 40
    launch = None
    for ends in (ENDS[case], [2 * end for end in ENDS[case]]):
        x, on_device, *weights = _given(ends, inner, columns, count, transposed)
        out = torch.full((len(x), columns), 9.0).half()
        if launch is None:
            launch = kernel(x, weights, out, on_device, SMALL, transposed)
        launch(x, *_two(weights), out, out, on_device)
        torch.testing.assert_close(out[: ends[-1]], _expected(x, on_device, *weights), rtol=2e-3, atol=2e-3)
        assert (out[ends[-1] :] == 9.0).all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_weights_values_behind_an_expert_do_not_matter(count: int) -> None:
    """Tiles of transposed weights read columns of the next expert, and inner dims that are no multiple of a tile."""
    x, ends, *weights = _given([5, 22, 70], 24, 40, count, True)
    for w in weights:
        w[1] = float("inf")
    out = torch.zeros(len(x), 40).half()
    kernel(x, weights, out, ends, SMALL, True)(x, *_two(weights), out, out, ends)
    expected = _expected(x, ends, *weights)
    torch.testing.assert_close(out[:5], expected[:5], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out[22:70], expected[22:70], rtol=2e-3, atol=2e-3)


def test_operands_of_other_layouts_are_refused_and_leave_no_trace() -> None:
    """A kernel that was prepared for strided rows would read between them."""
    x, ends, w = _given([5, 22, 70], 32, 40, 1, True)
    out = torch.zeros(len(x), 40).half()
    wide = torch.randn(len(x), 64).half()
    unaligned = torch.zeros(x.numel() + 1).half()[1:].view(x.shape)
    unaligned_ends = torch.zeros(4, dtype=torch.int32)[1:]
    for strided in (wide[:, :32], unaligned, x.t().contiguous().t()):
        assert prepared(strided, [w], out, ends) is None
    assert prepared(x, [w], out, torch.zeros(6, dtype=torch.int32)[::2]) is None
    assert prepared(x, [w], out, unaligned_ends) is None
    assert prepared(x, [w], out, ends.long()) is None
    assert prepared(x, [w[:1].expand(3, -1, -1)], out, ends) is None
    one_row = prepared(wide[:1, :32], [w], out[:1], ends)
    found = prepared(x, [w], out, ends)
    assert found is not None and found is one_row
    found(x, w, None, out, out, ends)
    torch.testing.assert_close(out[:70], _expected(x, ends, w), rtol=2e-3, atol=2e-3)


def test_row_major_weights_need_whole_tiles_of_the_contracted_dim() -> None:
    x, ends, w = _given([5, 22, 70], 32, 40, 1, False)
    assert prepared(x, [w], torch.zeros(len(x), 40).half(), ends) is None
    x, ends, w = _given([5, 22, 70], 64, 40, 1, False)
    assert prepared(x, [w], torch.zeros(len(x), 40).half(), ends) is not None

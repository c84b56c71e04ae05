# SPDX-License-Identifier: Apache-2.0
"""A rewritten graph assumes that some inputs are equal on all ranks. The ranks of a group compare
digests of these inputs."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.runtime.same_inputs import difference
from overlap_inductor.runtime.same_inputs import digest
from overlap_inductor.runtime.sketches import differ_by_rounding
from overlap_inductor.runtime.sketches import sketch
from tests.support.fake_group import fake_group


def test_a_fake_group_compares_nothing() -> None:
    with fake_group(2) as group:
        assert difference(group, {"primals_1": torch.ones(2)}) == ""


def test_a_digest_tells_values_shape_and_dtype() -> None:
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x[:5], torch.empty(0), x.to(torch.bfloat16), -x * 0]
    assert len({digest(t) for t in [x, *others]}) == len(others) + 1
    assert digest(x) == digest(x.clone()) == digest(torch.stack([x, x], 1)[:, 0]) == digest(x.requires_grad_())
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    narrow = x.detach().to(torch.float8_e4m3fn)
    assert digest(narrow) == digest(narrow.clone()) != digest(narrow.view(torch.uint8))


def test_the_storage_can_be_resized_afterwards() -> None:
    """FSDP2 frees a gathered parameter by resizing its storage, also after ``digest`` has read it."""
    x = torch.arange(6.0)
    digest(x)
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 300, 64), (12, 72), (700, 1), (1000,)])
def test_copies_that_differ_by_rounding_are_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The order of a sum changes its last bits. Other values differ by more, even if one row of 1200 differs."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(8, *shape, generator=generator, dtype=torch.float64).to(dtype)
    forward, backward = terms[0], terms[7]
    for number in range(1, 8):
        forward, backward = forward + terms[number], backward + terms[7 - number]
    if dtype.itemsize == 2:  # added in 32 bits, rounded once
        exact = terms.float().sum(0)
        forward = exact.to(dtype)
        backward = (exact * (1 + 1e-5 * torch.randn(shape, generator=generator))).to(dtype)
    assert digest(forward) != digest(backward)
    assert differ_by_rounding(sketch(forward), sketch(backward), dtype)
    other = forward.clone()
    other.view(-1, shape[-1])[-1] = torch.randn(shape[-1], generator=generator).to(dtype)
    assert not differ_by_rounding(sketch(forward), sketch(other), dtype)
    assert not differ_by_rounding(sketch(forward), sketch(forward / 2), dtype)


def test_what_has_no_sketch_differs() -> None:
    whole, narrow = torch.arange(4), torch.ones(4).to(torch.float8_e4m3fn)
    for tensor in (whole, narrow, torch.empty(0, 3), torch.ones(3, dtype=torch.bool)):
        assert sketch(tensor) is None and not differ_by_rounding(None, None, tensor.dtype)
    for value in (float("nan"), float("inf"), -float("inf")):
        finite, x = torch.ones(3, 4), torch.ones(3, 4)
        x[1, 2] = value
        assert sketch(x) is None
        assert not any(differ_by_rounding(sketch(a), sketch(b), x.dtype) for a, b in ((x, finite), (finite, x), (x, x)))
    assert not differ_by_rounding(sketch(torch.ones(3, 4)), sketch(torch.ones(2, 4)), torch.float32)


@pytest.mark.parametrize("shape", [(1, 4096), (4096,), (64, 4096), (3, 1000, 7)])
def test_large_elements_hide_no_other_difference(shape: tuple[int, ...]) -> None:
    """One row, or the first element, is much larger than all others (an attention sink, for example)."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.view(-1)[: shape[-1] if len(shape) > 1 and shape[0] > 1 else 1] *= 1e6
    other = x.clone()
    other.view(-1)[-64:] = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert differ_by_rounding(sketch(x.to(dtype)), sketch((x * (1 + 1e-9)).to(dtype)), dtype)
        assert not differ_by_rounding(sketch(x.to(dtype)), sketch(other.to(dtype)), dtype)


def test_values_whose_squares_are_infinite_have_no_sketch() -> None:
    assert sketch(torch.full((4, 64), 1e200, dtype=torch.float64)) is None
    largest = torch.full((4, 64), torch.finfo(torch.float32).max)
    assert differ_by_rounding(sketch(largest), sketch(largest * (1 - 1e-7)), torch.float32)
    assert not differ_by_rounding(sketch(largest), sketch(-largest), torch.float32)

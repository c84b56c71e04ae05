# SPDX-License-Identifier: Apache-2.0
"""The looping op of gathers, without other ranks: its matmuls on slices must give the result of the whole matmul."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.lowerings.ring.looped_gather_ops import Form
from overlap_inductor.lowerings.ring.looped_gather_ops import Matmul
from overlap_inductor.lowerings.ring.looped_gather_ops import _all_gather_matmul
from overlap_inductor.lowerings.ring.looped_gather_ops import as_it_stood
from overlap_inductor.lowerings.ring.looped_gather_ops import texts
from tests.support.fake_group import fake_group

FORMS = [
    Form(operand, role, turned)
    for (operand, role), turned in itertools.product(
        [("lhs", "M"), ("rhs", "N"), ("lhs", "K"), ("rhs", "K")], [False, True]
    )
]


def slice_by_slice(
    form: Form, shards: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None, cuts: list[int]
) -> torch.Tensor:
    count, rows, width = shards.shape
    places = [[slot * rows, (slot + 1) * rows] for slot in range(count)]
    matmul = Matmul(form, shards.reshape(count * rows, width), other, bias, places)
    matmul.add(shards[1], 1, 0)
    for slot in (0, 2):
        for start, stop in itertools.pairwise(cuts):
            matmul.add(shards[slot][start:stop], slot, start)
    return matmul.finish()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 4), (1, 4), (5, 0), (0, 4)])
def test_slices_make_the_whole_matmul(form: Form, rows: int, width: int) -> None:
    """An empty contraction gives zeros, plus the bias if there is one. Empty sub-chunks change nothing."""
    generator = torch.Generator().manual_seed(0)
    shards = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    inner = rows if form.transposed else width
    other = torch.randn(inner * (3 if form.contracted else 1), 6, generator=generator, dtype=torch.float64)
    other = form.turned(other).contiguous()
    cuts = [0, rows] if form.transposed and not form.contracted else [0, rows // 2, rows // 2, rows]
    left = torch.cat([s.t() if form.transposed else s for s in shards], 1 if form.contracted else 0)
    a, b = (left, other) if form.operand == "lhs" else (other, left.t())
    columns = b.shape[1]
    for bias in (None, torch.randn(columns, generator=generator, dtype=torch.float64)) if form.role != "N" else (None,):
        expected = a @ b if bias is None else a @ b + bias
        (whole,) = as_it_stood([form], shards.reshape(3 * rows, width), [other], [bias], 3)
        found = slice_by_slice(form, shards, other, bias, cuts)
        assert list(found.shape) == form.result_shape(shards[0], other, 3) and found.is_contiguous()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(whole, expected)


def test_a_split_contraction_is_summed_in_fp32() -> None:
    """In bf16, a small product would be lost when it is added to a large sum."""
    shards = torch.tensor([256.0, 1.0, 1.0]).bfloat16().view(3, 1, 1)
    found = slice_by_slice(Form("lhs", "K", False), shards, torch.ones(3, 1).bfloat16(), None, [0, 1])
    assert found.dtype == torch.bfloat16 and found.item() == 258


def test_shards_without_elements_leave_no_row_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op sends nothing, but must write the bias into every row of the result."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *sizes, **keywords: new_empty(self, *sizes, **keywords).fill_(7)
    )
    chain, bias = torch.zeros(1), torch.arange(4.0)
    with fake_group(3, 1):
        (found,), *_ = _all_gather_matmul(
            chain,
            torch.empty(2, 0),
            [torch.empty(0, 4)],
            [bias],
            "lhs M",
            1,
            0,
            "ring",
            dist.group.WORLD.group_name,
            "site",
        )
    assert torch.equal(found, bias.expand(6, 4))


def test_forms_as_text() -> None:
    assert texts(FORMS[:2] + FORMS[6:]) == "lhs M, lhs M transposed, rhs K, rhs K transposed"
    assert [Form.parse(t) for t in texts(FORMS).split(", ")] == FORMS

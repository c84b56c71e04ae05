# SPDX-License-Identifier: Apache-2.0
"""Which ops of experts' programs become one launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from overlap_inductor.lowerings.chunked import gate_ops as gate_ops
from overlap_inductor.lowerings.chunked import grouped_ops as grouped_ops
from overlap_inductor.lowerings.chunked.gated_pieces import weights_of
from overlap_inductor.lowerings.chunked.merged_program import GATED
from overlap_inductor.lowerings.chunked.merged_program import GROUPED
from overlap_inductor.lowerings.chunked.merged_program import MUL
from overlap_inductor.lowerings.chunked.merged_program import NO_WORK
from overlap_inductor.lowerings.chunked.merged_program import PRODUCT
from overlap_inductor.lowerings.chunked.merged_program import SILU
from overlap_inductor.lowerings.chunked.merged_program import SILU_TIMES
from overlap_inductor.lowerings.chunked.merged_program import merged
from overlap_inductor.lowerings.chunked.merged_program import merged_from_text
from overlap_inductor.sites.row_program import HandedOut
from overlap_inductor.sites.row_program import RowProgram


def _product(row: int, whole: int) -> tuple[str, Any, Any]:
    return PRODUCT, [{"row": row}, {"whole": whole}, {"ends": 0}], {}


def _times(row: int, other: int) -> tuple[str, Any, Any]:
    return MUL, [{"row": row}, {"row": other}], {}


SILU_OF_1 = SILU, [{"row": 1}], {}
GATED_EXPERTS = RowProgram(
    (_product(0, 0), SILU_OF_1, _product(0, 1), _times(2, 3), _product(4, 2)), 5, 16, "bfloat16", ()
)


def _names(program: RowProgram) -> list[str]:
    return [op[0] for op in merged(program, 1).ops if op != NO_WORK]


def test_gated_experts_are_two_launches() -> None:
    assert _names(GATED_EXPERTS) == [GATED, GROUPED]
    assert weights_of(merged_from_text(GATED_EXPERTS.to_text(), 1)) == (0, 1, 2)


def test_a_gate_on_the_right_of_the_product() -> None:
    ops = (*GATED_EXPERTS.ops[:3], _times(3, 2), GATED_EXPERTS.ops[4])
    assert _names(dataclasses.replace(GATED_EXPERTS, ops=ops)) == [GATED, GROUPED]


def test_values_that_others_read_are_computed() -> None:
    """In training, the products and the gated rows are saved."""
    saved = tuple(HandedOut(number, (24,), "bfloat16") for number in (0, 1, 3, 4))
    program = dataclasses.replace(GATED_EXPERTS, handed_out=saved)
    assert _names(program) == [GROUPED, GROUPED, SILU_TIMES, GROUPED]
    assert weights_of(merged(program, 1)) is None


def test_a_product_that_is_read_twice_is_computed() -> None:
    ops = (*GATED_EXPERTS.ops, _product(3, 3), ("aten.add.Tensor", [{"row": 5}, {"row": 6}], {}))
    program = dataclasses.replace(GATED_EXPERTS, ops=ops, result=7)
    assert _names(program)[:4] == [GROUPED, GROUPED, SILU_TIMES, GROUPED]


@pytest.mark.parametrize(
    "op",
    [
        (PRODUCT, [{"row": 0}, {"whole": 0}, {"ends": 0}, {"whole": 3}], {}),
        (PRODUCT, [{"row": 0}, {"whole": 0}, {"ends": 0}], {"out_dtype": {"dtype": "float32"}}),
        (PRODUCT, [{"row": 0}, {"row": 0}, {"ends": 0}], {}),
    ],
)
def test_a_product_with_more_than_rows_and_weights_is_left_as_written(op: Any) -> None:
    program = dataclasses.replace(GATED_EXPERTS, ops=(op, *GATED_EXPERTS.ops[1:]))
    assert _names(program) == [PRODUCT, GROUPED, SILU_TIMES, GROUPED]


def test_products_of_different_rows_are_not_gated_in_one_launch() -> None:
    """``silu(x @ w) * (y @ v)``, where ``y`` is another tensor of rows."""
    ops = (_product(0, 0), (SILU, [{"row": 2}], {}), _product(1, 1), _times(3, 4), _product(5, 2))
    program = RowProgram(ops, 6, 16, "bfloat16", ())
    assert [op[0] for op in merged(program, 2).ops if op != NO_WORK] == [GROUPED, GROUPED, SILU_TIMES, GROUPED]


def test_the_ops_compute_what_was_written() -> None:
    """On a CPU, the ops are computed as they were written."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(20, 16, generator=drawn).bfloat16()
    shapes = ((2, 16, 24), (2, 16, 24), (2, 24, 16))
    whole = [torch.randn(*shape, generator=drawn).bfloat16() for shape in shapes]
    ends = torch.tensor([7, 20], dtype=torch.int32)
    found = merged(GATED_EXPERTS, 1).run([x], whole, ends)[5]
    torch.testing.assert_close(found, GATED_EXPERTS.run([x], whole, ends)[5])

# SPDX-License-Identifier: Apache-2.0
"""Bring operands into the layout that the Triton matmuls need (by a copy), or refuse them. This module does not import
Triton."""

from __future__ import annotations

import torch

from overlap_inductor.errors import UnsupportedError


def left_operand(a: torch.Tensor) -> torch.Tensor:
    """``a``, contiguous and aligned to 16 bytes; copied if necessary."""
    a = a.contiguous()
    return a if a.data_ptr() % 16 == 0 else a.clone()


def right_operand(b: torch.Tensor) -> torch.Tensor:
    """``b [K, N]``, aligned to 16 bytes, in a layout that ``right_operand_fits`` accepts; copied if necessary. A copy
    fits only if ``N`` is a multiple of 8."""
    if not right_operand_fits(b):
        return b.contiguous()
    return b if b.data_ptr() % 16 == 0 else b.clone()


def bias_row(bias: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """``bias [columns]`` or ``bias [1]`` as a contiguous row of ``columns`` elements."""
    return None if bias is None else bias.expand(columns).contiguous()


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ``UnsupportedError`` if no Triton matmul of this project can compute ``a [M, K] @ b [K, N] + bias
    [N]``."""
    reason = why_not(a.dtype, a.shape[1], b.shape[1])
    if reason is not None or b.dtype != a.dtype:
        raise UnsupportedError(reason or f"the operands of a matmul are {a.dtype} and {b.dtype}; expected one dtype")
    if not a.is_contiguous() or a.data_ptr() % 16:
        raise UnsupportedError(
            f"the left operand has shape {list(a.shape)} and strides {list(a.stride())}; expected it contiguous and"
            " aligned to 16 bytes"
        )
    if not right_operand_fits(b) or b.data_ptr() % 16:
        raise UnsupportedError(
            f"the right operand has shape {list(b.shape)} and strides {list(b.stride())}; expected contiguous rows"
            " or contiguous columns, each of which begins at a multiple of 16 bytes"
        )
    if bias is not None and (bias.shape != b.shape[1:] or not bias.is_contiguous()):
        raise UnsupportedError(
            f"the bias has shape {list(bias.shape)} and strides {list(bias.stride())}; expected a contiguous row of"
            f" {b.shape[1]} elements"
        )


def why_not(dtype: torch.dtype, inner: int, columns: int) -> str | None:
    """Why no Triton matmul of this project can compute ``a [rows, inner] @ b [inner, columns]``; ``None`` if one
    can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the matrices are {dtype}; expected fp16 or bf16"
    if inner % 8 or columns % 8 or inner == 0 or columns == 0:
        return f"rows of {inner} and of {columns} elements cannot be read; expected positive multiples of 8 (16 bytes)"
    return None


def lies_transposed(b: torch.Tensor) -> bool:
    """Whether the transpose of ``b [K, N]`` has contiguous rows."""
    return b.stride(0) == 1 and b.stride(1) >= b.shape[0]


def right_operand_fits(b: torch.Tensor) -> bool:
    """Whether ``b [K, N]`` (16-bit) or its transpose has contiguous rows whose stride is a multiple of 16 bytes."""
    (down, across), (rows, columns) = b.stride(), b.shape
    return (down == 1 and across >= rows and across % 8 == 0) or (across == 1 and down >= columns and down % 8 == 0)

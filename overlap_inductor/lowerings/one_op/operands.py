"""Operands as the Triton matmuls need them: copied by an op where they lie otherwise, refused by a launch that would
read them wrongly. No Triton here."""

from __future__ import annotations

import torch

from overlap_inductor.errors import UnsupportedError


def left_operand(a: torch.Tensor) -> torch.Tensor:
    """``a`` contiguous at 16 bytes, by a copy where it is a slice that lies otherwise."""
    a = a.contiguous()
    return a if a.data_ptr() % 16 == 0 else a.clone()


def right_operand(b: torch.Tensor) -> torch.Tensor:
    """``b [K, N]`` in whole 16-byte rows or columns, by a copy where it lies otherwise."""
    if not right_operand_fits(b):
        return b.contiguous()
    return b if b.data_ptr() % 16 == 0 else b.clone()


def bias_row(bias: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """A bias of ``columns`` elements or of one as a contiguous row."""
    return None if bias is None else bias.expand(columns).contiguous()


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ``UnsupportedError`` where no Triton matmul is made for ``a @ b + bias``: dtype, sizes, layout."""
    reason = why_not(a.dtype, a.shape[1], b.shape[1])
    if reason is not None or b.dtype != a.dtype:
        raise UnsupportedError(
            reason or f"a fused kernel multiplies matrices of one dtype, not {a.dtype} and {b.dtype}"
        )
    if not a.is_contiguous() or a.data_ptr() % 16:
        raise UnsupportedError(
            f"the left operand of shape {list(a.shape)}, strides {list(a.stride())} is not contiguous at 16 bytes"
        )
    if not right_operand_fits(b) or b.data_ptr() % 16:
        raise UnsupportedError(
            f"the right operand of shape {list(b.shape)} has strides {list(b.stride())}; expected whole 16-byte rows or"
            " columns"
        )
    if bias is not None and (bias.shape != b.shape[1:] or not bias.is_contiguous()):
        raise UnsupportedError(
            f"the bias of shape {list(bias.shape)}, strides {list(bias.stride())} is no row of {b.shape[1]} elements"
        )


def why_not(dtype: torch.dtype, inner: int, columns: int) -> str | None:
    """What a Triton matmul of this project is not made for: ``a [rows, inner] @ b [inner, columns]``."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels multiply matrices of fp16 or bf16, not {dtype}"
    if inner % 8 or columns % 8 or inner == 0 or columns == 0:
        return f"rows of {inner} and of {columns} elements are no whole, positive number of 16-byte words"
    return None


def lies_transposed(b: torch.Tensor) -> bool:
    """Whether it is the transpose of ``b [K, N]`` that lies in rows."""
    return b.stride(0) == 1 and b.stride(1) >= b.shape[0]


def right_operand_fits(b: torch.Tensor) -> bool:
    """Whether ``b [K, N]`` lies in whole 16-byte rows, or its transpose does."""
    (down, across), (rows, columns) = b.stride(), b.shape
    return (down == 1 and across >= rows and across % 8 == 0) or (across == 1 and down >= columns and down % 8 == 0)

# SPDX-License-Identifier: Apache-2.0
"""Multiply some rows of the left operand at a time with the vendor's library, into the same rows of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Scales:
    """The scales of a matmul of fp8 matrices (``_scaled_mm``).

    Attributes:
        a, b: fp32. Either one element each, or one element for each row of the left operand ``[all rows, 1]`` and for
            each column of the right one ``[1, N]``.
        dtype: the result's dtype.
        fast: whether the sum over K may be kept in fewer bits.
    """

    a: torch.Tensor
    b: torch.Tensor
    dtype: torch.dtype
    fast: bool = False


@dataclass(frozen=True)
class VendorMatmul:
    """``rows @ b + bias``, plus the products in ``added``.

    Attributes:
        b: ``[K, N]`` in any layout that the library reads.
        bias: ``[N]`` or ``[1]``.
        added: ``(left operand [all rows, K_i], right operand [K_i, N])`` of each further product; not with scales.
    """

    b: torch.Tensor
    bias: torch.Tensor | None = None
    scales: Scales | None = None
    added: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors that the call reads besides ``rows``."""
        more = (t for pair in self.added for t in pair)
        return (self.b, self.bias, *more) if self.scales is None else (self.b, self.bias, self.scales.a, self.scales.b)

    @property
    def inner(self) -> int:
        """The sum of K over all products."""
        return self.b.shape[0] + sum(b.shape[0] for _, b in self.added)

    @property
    def fast(self) -> bool:
        """Whether the sum over K may be kept in fewer bits."""
        return self.scales is not None and self.scales.fast

    def dtype(self, a: torch.Tensor) -> torch.dtype:
        """The result's dtype for a left operand ``a``."""
        return a.dtype if self.scales is None else self.scales.dtype

    def __call__(self, rows: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """``out[start:stop] = rows @ b + bias + ...``. ``rows [stop - start, K]`` are rows ``start`` to ``stop`` of the
        left operand."""
        if self.scales is not None:
            scale = self.scales.a
            if scale.numel() > 1:
                scale = scale[start:stop]
                # A slice of scales may start at any row, but the library needs them aligned to 16 bytes.
                scale = scale if scale.data_ptr() % 16 == 0 else scale.clone()
            aten._scaled_mm.out(
                rows,
                self.b,
                scale,
                self.scales.b,
                self.bias,
                None,
                self.scales.dtype,
                self.scales.fast,
                out=out[start:stop],
            )
        elif self.bias is None:
            torch.mm(rows, self.b, out=out[start:stop])
        else:
            torch.addmm(self.bias, rows, self.b, out=out[start:stop])
        for a, b in self.added:
            out[start:stop].addmm_(a[start:stop], b)

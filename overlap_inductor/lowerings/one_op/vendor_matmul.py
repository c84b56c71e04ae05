# SPDX-License-Identifier: Apache-2.0
"""Matmuls by the vendor's library, some rows at a time. Each call multiplies some rows of the left operand, and writes
the same rows of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Scales:
    """The scales of an fp8 matmul (``_scaled_mm``).

    Attributes:
        a, b: fp32. One element each, or ``a [all rows, 1]`` for the left operand's rows and ``b [1, N]`` for the right
            operand's columns.
        dtype: the result's dtype.
        fast: ``use_fast_accum``: the sum over K may be less precise.
    """

    a: torch.Tensor
    b: torch.Tensor
    dtype: torch.dtype
    fast: bool = False


@dataclass(frozen=True)
class VendorMatmul:
    """Computes ``rows @ b + bias``, plus the products in ``added``.

    Attributes:
        b: ``[K, N]`` in any layout that the library reads.
        bias: ``[N]`` or ``[1]``.
        scales: if given, ``rows`` and ``b`` are fp8.
        added: ``(left operand [all rows, K_i], right operand [K_i, N])`` of each further product; empty with scales.
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
    def columns(self) -> int:
        return self.b.shape[1]

    @property
    def inner(self) -> int:
        """The sum of K over all products."""
        return self.b.shape[0] + sum(b.shape[0] for _, b in self.added)

    @property
    def fast(self) -> bool:
        return self.scales is not None and self.scales.fast

    def dtype(self, a: torch.Tensor) -> torch.dtype:
        """The result's dtype."""
        return a.dtype if self.scales is None else self.scales.dtype

    def __call__(self, rows: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write to ``out[start:stop]``. ``rows [stop - start, K]`` are rows ``start`` to ``stop - 1`` of the left
        operand. ``out`` is ``[all rows, N]``."""
        if self.scales is not None:
            scale = self.scales.a
            if scale.numel() > 1:
                scale = scale[start:stop]
                # The library reads only scales whose address is a multiple of 16.
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


@dataclass(frozen=True)
class SlicedMatmul(VendorMatmul):
    """Computes ``a @ b + bias`` in slices of columns, one for each rank. In ``out``, the slices are one below the
    other: for ``a [m, K]``, slice ``r`` is in rows ``r * m`` to ``(r + 1) * m - 1``. There are no scales or added
    products."""

    count: int = 1

    @property
    def columns(self) -> int:
        return self.b.shape[1] // self.count

    def __call__(self, rows: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write rows ``start`` to ``stop - 1`` of ``out``. ``rows [m, K]`` are all rows of the left operand."""
        m, width = len(rows), self.columns
        for slot in range(start // m, -(-stop // m)):
            first, end = max(start, slot * m), min(stop, (slot + 1) * m)
            columns = slice(slot * width, (slot + 1) * width)
            bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[columns]
            left = rows[first - slot * m : end - slot * m]
            VendorMatmul(self.b[:, columns], bias)(left, first, end, out)

"""A matmul by the vendor's library, of some rows of the left operand at a time, into the same rows of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Scales:
    """What makes a matmul of fp8 matrices one of numbers (``_scaled_mm``).

    Attributes:
        a, b: fp32, one element each; or one a row of the left operand ``[all rows, 1]`` and one a column of the right
            one ``[1, N]``.
        dtype: of the result. fast: the sum over K may be kept in fewer bits.
    """

    a: torch.Tensor
    b: torch.Tensor
    dtype: torch.dtype
    fast: bool = False


@dataclass(frozen=True)
class VendorMatmul:
    """``rows @ b + bias``: ``b [K, N]`` in any layout that the library takes, ``bias [N]`` or ``[1]``; and more
    products ``added`` to it, each of a left operand ``[all rows, K_i]`` and a right one ``[K_i, N]`` (without scales).
    """

    b: torch.Tensor
    bias: torch.Tensor | None = None
    scales: Scales | None = None
    added: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors that it reads but for the left one."""
        more = (t for pair in self.added for t in pair)
        return (self.b, self.bias, *more) if self.scales is None else (self.b, self.bias, self.scales.a, self.scales.b)

    @property
    def inner(self) -> int:
        """K, of all products together."""
        return self.b.shape[0] + sum(b.shape[0] for _, b in self.added)

    @property
    def fast(self) -> bool:
        """Whether the sum over K may be kept in fewer bits."""
        return self.scales is not None and self.scales.fast

    def dtype(self, a: torch.Tensor) -> torch.dtype:
        """Of the result."""
        return a.dtype if self.scales is None else self.scales.dtype

    def __call__(self, rows: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """``out[start:stop] = rows @ b + bias + ...``; ``rows [stop - start, K]``: those rows of the left operand."""
        if self.scales is not None:
            scale = self.scales.a
            if scale.numel() > 1:
                scale = scale[start:stop]
                # (A slice of odd rows; the library wants 16 bytes.)
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

# SPDX-License-Identifier: Apache-2.0
"""One case on this rank: its operands, its plain computation and its expected result."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.shapes import Case
from overlap_inductor.passes.pattern import Example

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""For each dtype of a result, the largest error that is allowed, relative to the largest element."""


def product(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """``x @ weight.t()``. With ``scales``, operands are fp8 and the result is bf16, summed with fast accumulation.
    There is one scale for each operand, or for each row of ``x`` and of ``weight``."""
    if not scales:
        return torch.nn.functional.linear(x, weight)
    return torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """``x``, viewed as bytes if its dtype is fp8, because not every backend moves fp8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def as_made(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo ``as_sent``: ``x`` in the dtype of ``like``."""
    return x if x.dtype == like.dtype else x.view(like.dtype)


def plain(example: Example, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """The pattern as a model computes it: a function of ``x``, ``weight [N, K]`` and, for fp8, the two scales."""
    if example.first:
        return lambda x, *rest: product(as_made(example.traced(as_sent(x), group), x), *rest)
    return lambda *operands: example.traced(product(*operands), group)


class Site:
    """The operands of a case on this rank, with random values.

    Attributes:
        a: ``[case.rows, K]``, in ``case.dtype``.
        weight: ``[N, K]``, in ``case.dtype``. ``b`` is its transpose.
        scales: for fp8, the scales of ``left`` and of ``weight``, in fp32; else empty.
        left: the matmul's left operand: ``a``, or the collective's result if the pattern begins with the collective.
        moved: the tensor that ``collective`` moves.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.group = case, device, dist.group.WORLD
        self.example = case.example
        kind = {"device": device, "dtype": case.result}
        self.a = (torch.randn(case.rows, case.inner, **kind) / 4).to(case.dtype)
        self.weight = (torch.randn(case.columns, case.inner, **kind) / 16).to(case.dtype)
        self.b = self.weight.t()
        self.scales = [torch.rand(shape, device=device) + 0.5 for shape in case.scale_shapes]
        self.operands = (self.a, self.weight, *self.scales)
        self.left = self._exchanged() if self.example.first else self.a
        # A collective after the matmul may sum in place. It gets zeros, because other values would grow from call to
        # call.
        self.moved = as_sent(self.a) if self.example.first else torch.zeros(len(self.left), case.columns, **kind)

    def _exchanged(self) -> torch.Tensor:
        return as_made(self.example.eager(as_sent(self.a), self.group), self.a)

    def matmul(self) -> torch.Tensor:
        return product(self.left, self.weight, *self.scales)

    def collective(self) -> None:
        self.example.eager(self.moved, self.group)

    def keep(self) -> torch.Tensor:
        """Run the collective of NCCL (gloo on a CPU) and the vendor's matmul, one after the other."""
        if self.example.first:
            return product(self._exchanged(), self.weight, *self.scales)
        return self.example.eager(self.matmul(), self.group)

    def async_tp(self) -> torch.Tensor:
        """Call the op of Inductor's async TP. The group's symmetric memory must be enabled."""
        name = self.group.group_name
        if self.example.first:
            return torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, name)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, name)

    def expected(self) -> torch.Tensor:
        """The right result, computed in fp32 (fp64 for fp32 operands) with the collective of the group's backend."""
        wide = torch.float64 if self.case.dtype == torch.float32 else torch.float32
        left = self._exchanged() if self.example.first else self.a
        exact = left.to(wide) @ self.b.to(wide)
        for scale in self.scales:
            exact *= scale
        return exact if self.example.first else self.example.eager(exact, self.group)

    def error(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """The largest error, relative to the largest element. Infinite if the shape or dtype is wrong or an element is
        not finite."""
        if found.shape != expected.shape or found.dtype != self.case.result or not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found.to(expected.dtype) - expected).abs().max() / expected.abs().max())

"""One case on this rank: its operands, what is computed plainly, and what must come out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.shapes import Case
from overlap_inductor.lowerings import reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Of the largest element, by the result's dtype."""
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def product(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """``x @ weight.t()``; of fp8 in bf16, with ``scales`` of rows and columns (or one each), summed as fast as the
    library does."""
    if not scales:
        return torch.nn.functional.linear(x, weight)
    return torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """fp8 travels as bytes: not every backend knows it."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def plain(pattern: str, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """The pattern as a model has it: of ``x``, a linear layer's ``weight [N, K]``, and of fp8 the two scales."""

    def gathered(x: torch.Tensor) -> torch.Tensor:
        found = all_gather(as_sent(x), 0, group)
        return found if found.dtype == x.dtype else found.view(x.dtype)

    if pattern == "all_gather_matmul":
        return lambda x, *rest: product(gathered(x), *rest)
    if pattern == "matmul_reduce_scatter":
        return lambda *operands: reduce_scatter(product(*operands), "sum", 0, group)
    return lambda *operands: funcol.all_reduce(product(*operands), "sum", group)


class Site:
    """``a [tokens / W or tokens, K]``, ``weight [N, K]`` and its transpose ``b``, random, in ``case.dtype``;
    ``scales``, fp32: of all tokens and of ``weight``."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.group = case, device, dist.group.WORLD
        kind = {"device": device, "dtype": case.result}
        self.a = (torch.randn(case.shard_rows if case.gathers else case.tokens, case.inner, **kind) / 4).to(case.dtype)
        self.weight = (torch.randn(case.columns, case.inner, **kind) / 16).to(case.dtype)
        self.b = self.weight.t()
        self.scales = [torch.rand(shape, device=device) + 0.5 for shape in case.scale_shapes]
        self.gathered = self.a.new_empty(case.tokens, case.inner) if case.gathers else self.a
        self.operands = (self.a, self.weight, *self.scales)
        # (Summed in place again and again, anything but zeros grows.)
        self.summed = None if case.gathers else torch.zeros(case.tokens, case.columns, **kind)
        self.scattered = (
            torch.empty(case.shard_rows, case.columns, **kind) if case.pattern == "matmul_reduce_scatter" else None
        )

    def matmul(self) -> torch.Tensor:
        return product(self.gathered, self.weight, *self.scales)

    def collective(self) -> None:
        if self.case.gathers:
            dist.all_gather_into_tensor(as_sent(self.gathered), as_sent(self.a))
        elif self.scattered is not None:
            dist.reduce_scatter_tensor(self.scattered, self.summed)
        else:
            dist.all_reduce(self.summed)

    def keep(self) -> torch.Tensor:
        """NCCL (gloo on a CPU) and the vendor's matmul, one after the other."""
        if self.case.gathers:
            gathered = torch.empty_like(self.gathered)
            dist.all_gather_into_tensor(as_sent(gathered), as_sent(self.a))
            return product(gathered, self.weight, *self.scales)
        return reference.reduced(self.case.pattern, self.matmul(), "sum", self.group)

    def async_tp(self) -> torch.Tensor:
        """The op that Inductor's async TP puts there; the group's symmetric memory must be enabled."""
        name = self.group.group_name
        if self.case.gathers:
            return torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, name)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, name)

    def expected(self) -> torch.Tensor:
        """In fp32 (of fp32 operands: fp64), from inputs that the group's backend has exchanged."""
        wide = torch.float64 if self.case.dtype == torch.float32 else torch.float32
        if self.case.gathers:
            self.collective()
        exact = self.gathered.to(wide) @ self.b.to(wide)
        for scale in self.scales:
            exact *= scale
        if self.case.gathers:
            return exact
        dist.all_reduce(exact)
        return exact.chunk(self.case.world_size)[self.group.rank()].clone() if self.scattered is not None else exact

    def error(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """The largest, relative to the largest element; infinite where a shape or dtype is wrong or an element is not
        finite."""
        if found.shape != expected.shape or found.dtype != self.case.result or not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found.to(expected.dtype) - expected).abs().max() / expected.abs().max())

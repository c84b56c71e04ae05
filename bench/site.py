"""One case on this rank: its operands, what is computed plainly, and what must come out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.shapes import Case
from overlap_inductor.lowerings import reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Of the largest element."""
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def plain(pattern: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The pattern as a model has it: of ``x``, and a linear layer's ``weight [N, K]``."""
    if pattern == "all_gather_matmul":
        return lambda x, weight: torch.nn.functional.linear(all_gather(x, 0, group), weight)
    if pattern == "matmul_reduce_scatter":
        return lambda x, weight: reduce_scatter(torch.nn.functional.linear(x, weight), "sum", 0, group)
    return lambda x, weight: funcol.all_reduce(torch.nn.functional.linear(x, weight), "sum", group)


class Site:
    """``a [tokens / W or tokens, K]``, ``weight [N, K]`` and its transpose ``b``, random, in ``case.dtype``."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.group = case, device, dist.group.WORLD
        kind = {"device": device, "dtype": case.dtype}
        self.a = torch.randn(case.shard_rows if case.gathers else case.tokens, case.inner, **kind) / 4
        self.weight = torch.randn(case.columns, case.inner, **kind) / 16
        self.b = self.weight.t()
        self.gathered = torch.empty(case.tokens, case.inner, **kind) if case.gathers else self.a
        # (Summed in place again and again, anything but zeros grows.)
        self.summed = None if case.gathers else torch.zeros(case.tokens, case.columns, **kind)
        self.scattered = torch.empty(case.shard_rows, case.columns, **kind) if case.pattern == "matmul_reduce_scatter" else None

    def matmul(self) -> torch.Tensor:
        return torch.mm(self.gathered, self.b)

    def collective(self) -> None:
        if self.case.gathers:
            dist.all_gather_into_tensor(self.gathered, self.a)
        elif self.scattered is not None:
            dist.reduce_scatter_tensor(self.scattered, self.summed)
        else:
            dist.all_reduce(self.summed)

    def keep(self) -> torch.Tensor:
        """NCCL (gloo on a CPU) and the vendor's matmul, one after the other."""
        if self.case.gathers:
            return reference.all_gather_matmul(self.a, [self.b], [None], self.group)[1][0]
        return getattr(reference, self.case.pattern)([self.a], [self.b], [None], "sum", self.group)

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
        product = self.gathered.to(wide) @ self.b.to(wide)
        if self.case.gathers:
            return product
        dist.all_reduce(product)
        return product.chunk(self.case.world_size)[self.group.rank()].clone() if self.scattered is not None else product

    def error(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """The largest, relative to the largest element; infinite where a shape or dtype is wrong or an element is not finite."""
        if found.shape != expected.shape or found.dtype != self.case.dtype or not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found.to(expected.dtype) - expected).abs().max() / expected.abs().max())

# SPDX-License-Identifier: Apache-2.0
"""Compiles the ends of two layers with schedule ``small_message``. The graph runs on several processes, with kernels in
Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.shared_memory import use_shared_memory


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float() if x.dtype == torch.float16 else x
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def two_layers(
    x: torch.Tensor, residual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The end of a Llama layer, twice, and an all-reduce without a norm. The second layer reads the first layer's
    norm."""
    group = dist.group.WORLD
    first = residual + funcol.all_reduce(x @ a, "sum", group)
    second = first + funcol.all_reduce(_norm(first, gain) @ b, "sum", group)
    return _norm(second, gain), second, funcol.all_reduce(x @ a.neg(), "sum", group)


def _check(rank: int, world_size: int, folder: str, dynamic: bool) -> list[str]:
    use_shared_memory(folder)
    problems = []
    reports: list[OverlapReport] = []
    compiled = torch.compile(
        two_layers, backend=interpreted(OverlapConfig(schedule="small_message", mode="strict"), reports)
    )
    weights = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).half() / 4 for shape in ((16, 48), (48, 48))
    ]
    gain = torch.randn(48, generator=torch.Generator().manual_seed(99)).half()
    for call, rows in enumerate((5, 2, 1, 7) if dynamic else (3, 3, 3)):
        x = torch.randn(1, rows, 16, generator=torch.Generator().manual_seed(7 * rank + call)).half()
        residual = torch.randn(1, rows, 48, generator=torch.Generator().manual_seed(call)).half()
        if dynamic and rows > 1:
            for tensor in (x, residual):
                torch._dynamo.mark_dynamic(tensor, 1)
        inputs = (x, residual, *weights, gain)
        exact, found = two_layers(*(i.double() for i in inputs)), compiled(*inputs)
        for name, e, f in zip(("normed", "residual", "plain"), exact, found, strict=True):
            if (
                f.dtype != torch.float16
                or f.shape != e.shape
                or not torch.allclose(f.double(), e, rtol=2e-2, atol=5e-2)
            ):
                problems.append(
                    f"{name} of {rows} rows, call {call}: {tuple(f.shape)} off by {(f.double() - e).abs().max():.3g}"
                )
    plans: list[Any] = [s.decision.plan for r in reports for s in r.sites]
    if any(p[0].schedule != "small_message" for p in plans) or not plans:
        problems.append(f"{plans}")
    fused = [r.after.count("small_message_matmul_all_reduce_norm.default(") for r in reports]
    # With a dynamic token count, the kernel computes no norm. torch compiles another graph for one row. In this graph,
    # the count is static, so the kernel computes both norms.
    if fused != ([0, 2] if dynamic else [2]):
        problems.append(f"{fused} norms computed in the all-reduce's kernel")
    if any("_c10d_functional" in r.after for r in reports) or (not dynamic and "rsqrt" in reports[0].after):
        problems.append(reports[0].after)
    return problems


def test_layers_of_few_tokens(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), False, timeout=300)):
        assert not problems, f"rank {rank}: {problems}"


def test_a_token_count_that_changes(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), True, timeout=300)):
        assert not problems, f"rank {rank}: {problems}"

# SPDX-License-Identifier: Apache-2.0
"""Layers with random shapes, dtypes and switches on gloo ranks: outputs and gradients against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st

from bench.support.hand_written import GatherTokens
from bench.support.hand_written import ScatterTokens
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.drawn import drawn
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted


class ReduceForward(torch.autograd.Function):
    """``forward`` sums over the ranks, as in plain tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


# {name: (function of (x, w, v, dim), sites forward, sites backward)}; w is [k, n], v is [n, k].
LAYERS: dict[str, tuple[Callable[..., torch.Tensor], int, int]] = {
    "column": (lambda x, w, v, dim: GatherTokens.apply(x, dim, dist.group.WORLD) @ w, 1, 1),
    "row": (lambda x, w, v, dim: ScatterTokens.apply(x @ w, dim, dist.group.WORLD), 1, 1),
    "mlp": (
        lambda x, w, v, dim: ScatterTokens.apply(
            F.silu(GatherTokens.apply(x, dim, dist.group.WORLD) @ w) @ v, dim, dist.group.WORLD
        ),
        2,
        2,
    ),
    "plain": (lambda x, w, v, dim: ReduceForward.apply(F.gelu(x @ w) @ v), 1, 0),
}


def _draws(rank: int, world_size: int, examples: int) -> tuple[int, list[str]]:
    """``(number of examples, problems)`` of this rank."""
    problems: list[str] = []
    count = 0

    @drawn(
        examples,
        layer=st.sampled_from(sorted(LAYERS)),
        dim=st.sampled_from([0, 1]),
        batch=st.integers(1, 3),
        rows=st.integers(1, 9),
        k=st.integers(1, 17),
        n=st.integers(1, 9),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        sub_chunks=st.integers(1, 4),
        direction=st.sampled_from(["unidirectional", "bidirectional"]),
        numerics=st.sampled_from(["preserve", "allow_hop_rounding"]),
        step_node_budget=st.sampled_from([4000, 1]),
    )
    def check(layer: str, dim: int, batch: int, rows: int, k: int, n: int, dtype: torch.dtype, **fields: Any) -> None:
        nonlocal count
        count += 1
        fields["ring_direction"] = fields.pop("direction")
        function, *expected = LAYERS[layer]
        tokens = rows * world_size if layer == "row" else rows
        generator = torch.Generator().manual_seed(rank)
        shape = (tokens, batch, k) if dim == 0 else (batch, tokens, k)
        inputs = [
            torch.randn(s, generator=generator, dtype=torch.float64) / s[-1] ** 0.5 for s in (shape, (k, n), (n, k))
        ]
        torch._dynamo.reset()
        reports: list[OverlapReport] = []
        given_ = [i.to(dtype).requires_grad_() for i in inputs]
        exact_ = [i.detach().double().requires_grad_() for i in given_]
        found = torch.compile(
            function, backend=interpreted(OverlapConfig(schedule="ring", **fields), reports), dynamic=False
        )(*given_, dim)
        exact = function(*exact_, dim)
        found.backward(torch.ones_like(found))
        exact.backward(torch.ones_like(exact))
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        pairs = [("output", found, exact)] + [
            (f"gradient {i}", a.grad, b.grad) for i, (a, b) in enumerate(zip(given_, exact_, strict=True))
        ]
        what = f"{layer} {shape} k={k} n={n} dim={dim} {dtype} {fields}"
        for name, a, b in pairs:
            if (a is None) != (b is None):
                problems.append(f"{what}: {name} is {a}, expected {b}")
            elif a is not None and (
                a.shape != b.shape or (a.double() - b).abs().max() > tolerance * max(1.0, float(b.abs().max()))
            ):
                problems.append(f"{what}: {name} is off by {(a.double() - b).abs().max():.3g} of {b.abs().max():.3g}")
        problems.extend(f"{what}: {text}" for r in reports for text in waste(r))
        overlapped = [sum(s.decision.status == "overlapped" for s in r.sites) for r in reports]
        # torch may compute a product with one row or column without a matmul. Then there is no site.
        if min(k, n, tokens * batch) > 1 and overlapped != expected:
            reasons = [x.text for r in reports for s in r.sites for x in s.decision.reasons] + [
                m.reason.text for r in reports for m in r.near_misses
            ]
            problems.append(f"{what}: {overlapped} sites overlapped, expected {expected}; {reasons}")

    check()
    return count, problems


@pytest.mark.parametrize(
    ("world_size", "examples"),
    [
        pytest.param(2, 12, marks=pytest.mark.thorough),
        (3, 3),
        pytest.param(3, 10, marks=pytest.mark.thorough),
        pytest.param(4, 4, marks=pytest.mark.thorough),
    ],
)
def test_drawn_layers(world_size: int, examples: int) -> None:
    """Catches a shape, dtype or switch at which a slice is wrong, rows are lost, or a gradient is summed twice."""
    results = run_ranks(world_size, _draws, examples, timeout=500)
    assert {count for count, _ in results} == {examples}
    for rank, (_, problems) in enumerate(results):
        assert not problems, f"rank {rank}: {problems}"

# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on gloo ranks: the gathers of keys and values run under the attention. The output is
compared with fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.context_parallel import LAYERS
from tests.support.context_parallel import MASKS
from tests.support.context_parallel import all_queries
from tests.support.context_parallel import exact
from tests.support.context_parallel import gathered
from tests.support.context_parallel import heads_first
from tests.support.context_parallel import mask_of
from tests.support.context_parallel import tokens_first
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

PATTERN = "all_gather_attention"


class _Problem:
    """One rank's tensors, ``[batch, heads, tokens, width]``, and the output in fp64. Each rank draws all ranks' tensors
    with one seed."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        mask: str,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        layer: Any,
        scale: float | None = None,
    ) -> None:
        batch, heads, shared, own = sizes
        self.layer = layer
        torch.manual_seed(hash((ranks, *sizes)) % 1000)
        shapes = [(batch, heads, own, 8), *[(batch, heads // shared, own, 8)] * 2]
        every = [[torch.randn(shape).mul(3).to(dtype) for shape in shapes] for _ in range(ranks)]
        self.own = every[rank]
        torch.manual_seed(rank)
        rows = own * (ranks if layer is all_queries else 1)
        self.mask = mask_of(mask, 0 if layer is all_queries else rank, heads, rows, own * ranks)
        if isinstance(self.mask, torch.Tensor) and self.mask.is_floating_point():
            self.mask = self.mask.to(dtype)
        queries, keys, values = (torch.cat([parts[i] for parts in every], 2) for i in range(3))
        self.expected = exact(queries if layer is all_queries else self.own[0], keys, values, self.mask, scale)

    def error(self, call: Any) -> float:
        turned = self.layer is tokens_first
        own = [x.transpose(1, 2).contiguous() for x in self.own] if turned else self.own
        with torch.no_grad():
            found = call(*own, self.mask)
        assert found.dtype is self.own[0].dtype
        found = found.transpose(1, 2) if turned else found
        return float((found.double() - self.expected).abs().max())


def _statuses(reports: list[OverlapReport]) -> list[tuple[str, str]]:
    """The pattern and status of each site, and the reason of each near miss. Near misses without a matmul, such as the
    gather of the queries, are left out."""
    found = [(s.facts.pattern, s.decision.status) for r in reports for s in r.sites]
    return found + [
        (m.reason.code, m.reason.text) for r in reports for m in r.near_misses if m.reason.code != "no_matmul"
    ]


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = ((2, 4, 2, 5), (1, 2, 1, 16), (1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 2, 16))
"""``(batch, heads of the queries, heads of the queries for each head of the keys, tokens of each rank)``."""


def _cases(world_size: int) -> list[tuple[str, Any, torch.dtype, tuple[int, int, int, int], str]]:
    """Each mask has two cases, which differ in the layer and in the ring's direction. Dtype and sizes change from case
    to case."""
    found = []
    for i, (mask, second) in enumerate(itertools.product(MASKS, (False, True))):
        layer = LAYERS[(i // 2 * 3 + second + world_size) % len(LAYERS)]
        direction = ("unidirectional", "bidirectional")[(i // 2 + second) % 2]
        found.append((mask, layer, DTYPES[i % 3], SIZES[(i + world_size) % len(SIZES)], direction))
    return found


def _compared(rank: int, world_size: int, part: slice) -> list[str]:
    """What went wrong on this rank in a part of the cases of ``_cases``."""
    problems = []
    for mask, layer, dtype, sizes, direction in _cases(world_size)[part]:
        problem = _Problem(rank, world_size, mask, dtype, sizes, layer)
        torch._dynamo.reset()
        reports: list[OverlapReport] = []
        config = OverlapConfig(schedule="ring", ring_direction=direction, sequence_parallel="off")
        backend = interpreted(config, reports)
        error = problem.error(torch.compile(layer, backend=backend, dynamic=False, fullgraph=True))
        plain = problem.error(layer)
        text = f"{layer.__name__} {mask} {dtype} {sizes} {direction}"
        if _statuses(reports) != [(PATTERN, "overlapped")]:
            problems.append(f"{text}: {_statuses(reports)}")
        # The output of each piece is rounded, and the merged output is rounded again. So the error may be twice the
        # error of the plain layer.
        if not error <= 2 * plain + 8 * torch.finfo(dtype).eps:
            problems.append(f"{text}: error {error}, without overlap {plain}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "part"),
    [
        (2, slice(0, None, 4)),
        pytest.param(2, slice(2, None, 4), marks=pytest.mark.thorough),
        (3, slice(1, None, 4)),
        pytest.param(2, slice(1, None, 2), marks=pytest.mark.thorough),
        pytest.param(3, slice(3, None, 4), marks=pytest.mark.thorough),
        pytest.param(3, slice(0, None, 2), marks=pytest.mark.thorough),
    ],
    ids=[
        "2 ranks",
        "2 ranks, other masks",
        "3 ranks",
        "2 ranks, other layers",
        "3 ranks, other masks",
        "3 ranks, other layers",
    ],
)
def test_random_attention(world_size: int, part: slice) -> None:
    """Catches a wrong merge, and keys or mask columns of a wrong rank. Some queries see no key of one rank.
    Other queries see no key of any rank."""
    assert run_ranks(world_size, _compared, part, timeout=500) == [[]] * world_size


def _lengths(rank: int, world_size: int) -> list[str]:
    """What went wrong on this rank in two graphs, one with a causal mask and one with a random mask. Each graph runs
    with several lengths."""
    problems = []
    for mask in ("is_causal", "random"):
        torch._dynamo.reset()
        reports: list[OverlapReport] = []

        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
            given = {"is_causal": True} if mask is True else {"attn_mask": mask}
            return torch.nn.functional.scaled_dot_product_attention(q, gathered(k, 2), gathered(v, 2), **given)

        config = OverlapConfig(schedule="ring", sub_chunks=2, sequence_parallel="off")
        call = torch.compile(layer, backend=interpreted(config, reports), dynamic=True, fullgraph=True)
        for own in (12, 5):
            problem = _Problem(rank, world_size, mask, torch.float32, (3, 4, 1, own), layer)
            if not (error := problem.error(call)) <= 1e-5:
                problems.append(f"{mask}, {own} tokens: error {error}")
        if _statuses(reports) != [(PATTERN, "overlapped")]:
            problems.append(f"{mask}: {_statuses(reports)}")
    return problems


def test_symbolic_lengths() -> None:
    """No mask or shard may keep the size of the first call."""
    assert run_ranks(2, _lengths) == [[]] * 2


def _emulated(kernel: str) -> Callable[..., Any]:
    """CUDA's attention op ``kernel``, emulated on the CPU. Elements that the op does not define are NaN or
    infinite."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_bias: torch.Tensor | None = None,
        compute_log_sumexp: bool = kernel == "flash",
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert not dropout_p
        scores = (q.float() @ k.float().transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
        if attn_bias is not None:
            assert attn_bias.shape == scores.shape and attn_bias.dtype is q.dtype and attn_bias.stride(-1) == 1
            scores = scores + attn_bias
        if is_causal:
            seen = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])
            scores = scores.masked_fill(~seen, -math.inf)
        sums = scores.logsumexp(-1)
        sums = sums.masked_fill(sums == -math.inf, math.nan) if compute_log_sumexp else torch.full_like(sums, math.nan)
        out, none = (torch.softmax(scores, -1) @ v.float()).to(q.dtype), torch.empty(0)
        if kernel == "efficient":
            padding = -q.shape[2] % 32 if compute_log_sumexp else -q.shape[2]
            return out, torch.nn.functional.pad(sums, (0, padding), value=math.inf), none, none
        sums = sums[..., None] if kernel == "cudnn" else sums
        return out, sums, none, none, q.shape[2], k.shape[2], none, none, none

    return attention


def _gpu_ops(rank: int, world_size: int) -> list[str]:
    """What went wrong on this rank with CUDA's attention ops, which are emulated."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for kernel in ("flash", "efficient", "cudnn"):
        library.impl(f"_scaled_dot_product_{kernel}_attention", _emulated(kernel))
    problems = []
    for kernel, mask, own in (
        ("flash", "none", 5),
        ("cudnn", "none", 5),
        ("efficient", "none", 5),
        ("efficient", "random", 8),
        ("efficient", "is_causal", 8),
    ):
        op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")

        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, op: Any = op) -> torch.Tensor:
            k, v = gathered(k, 2), gathered(v, 2)
            if op is torch.ops.aten._scaled_dot_product_flash_attention:
                return op(q, k, v, 0.0, scale=0.5)[0]
            bias = None if mask is None or mask is True else torch.zeros(()).masked_fill(~mask, -math.inf)
            bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
            return op(q, k, v, bias, False, 0.0, mask is True, scale=0.5)[0]

        problem = _Problem(rank, world_size, mask, torch.float32, (2, 2, 1, own), layer, scale=0.5)
        torch._dynamo.reset()
        reports: list[OverlapReport] = []
        backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2, sequence_parallel="off"), reports)
        error = problem.error(torch.compile(layer, backend=backend, dynamic=False, fullgraph=True))
        if _statuses(reports) != [(PATTERN, "overlapped")] or not error <= 1e-5:
            problems.append(f"{kernel} {mask}: error {error}, {_statuses(reports)}")
    return problems


def test_ops_of_gpus() -> None:
    """The ring must ask the ops for log-sum-exps, and read them in the layout of each op. Values that an op does not
    define must not be used."""
    assert run_ranks(2, _gpu_ops) == [[]] * 2


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return heads_first(q, k * 1, v * 1, mask)


def _compiled(rank: int, world_size: int) -> list[str]:
    """What went wrong on this rank in generated code."""
    compile_anew(kernels=False)
    problems = []
    for mask, dtype in (("random", torch.float32), ("none", torch.bfloat16), ("is_causal", torch.float32)):
        torch._dynamo.reset()
        problem = _Problem(rank, world_size, mask, dtype, (2, 4, 2, 32), heads_first)
        plain = problem.error(heads_first)
        before = len(all_reports())
        with overlap_inductor.overlap(schedule="ring", sub_chunks=2, sequence_parallel="off"):
            error = problem.error(torch.compile(_layer, dynamic=False))
        if _statuses(all_reports()[before:]) != [(PATTERN, "overlapped")]:
            problems.append(f"{mask}: {_statuses(all_reports()[before:])}")
        if not error <= 2 * plain + 8 * torch.finfo(dtype).eps:
            problems.append(f"{mask}: error {error}, without overlap {plain}")
    dist.barrier()
    return problems


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_generated_code(world_size: int) -> None:
    """Inductor must not reuse a buffer too early, or slice the mask at a wrong offset."""
    assert run_ranks(world_size, _compiled) == [[]] * world_size

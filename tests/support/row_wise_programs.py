# SPDX-License-Identifier: Apache-2.0
"""Programs with row-wise ops between a matmul and a collective, or with batched or int8 matmuls. A row-wise op can be
computed on any part of the rows. Each program is a function of fp64 tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.support.hand_written import GatherTokens
from bench.support.hand_written import ScatterTokens
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.expert_layers import gated
from tests.support.spellings import GATHER
from tests.support.spellings import REDUCE
from tests.support.spellings import SCATTER
from tests.support.spellings import world

Shape = tuple[int, ...]
Expected = tuple[str, list[str]]


def gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return all_gather(x, dim, world())


def reduce(x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, "sum", world())


def scatter(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return reduce_scatter(x, "sum", dim, world())


def int8(x: torch.Tensor) -> torch.Tensor:
    return (x * 40).to(torch.int8)


def trained_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The reduce-scatter of the sum of the experts' results, with a backward."""
    return ScatterTokens.apply((x.relu() @ w).sum(0), 0, world())


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def trained_norm(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A layer that gathers its input before the norm, with a backward."""
    hidden = F.silu(rms(GatherTokens.apply(x, 1, world()), g) @ w)
    return ScatterTokens.apply(hidden @ v, 1, world())


# name: (function, world size -> input shapes, (pattern, sorted "kind role" of the matmuls)). A role is the matmul's dim
# that is cut: M, N, K, or B for a batch.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Shape]], Expected]] = {
    "rms norm": (lambda x, g, w: rms(gather(x), g) @ w, lambda n: [(4, 16), (16,), (16, 6)], (GATHER, ["mm M"])),
    "rms norm of a sequence": (
        lambda x, g, w: rms(gather(x, 1), g) @ w,
        lambda n: [(2, 3, 16), (16,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "rms norm, and the gathered tensor": (
        lambda x, g, w, v: (rms((y := gather(x, 1)), g) @ w, y @ v, y),
        lambda n: [(2, 3, 16), (16,), (16, 6), (16, 4)],
        (GATHER, ["mm M", "mm M"]),
    ),
    "layer norm": (
        lambda x, g, b, w: F.layer_norm(gather(x), (16,), g, b) @ w,
        lambda n: [(4, 16), (16,), (16,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "layer norm of a sequence": (
        lambda x, g, b, w: F.layer_norm(gather(x, 1), (16,), g, b) @ w,
        lambda n: [(2, 3, 16), (16,), (16,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "norm of each head": (
        lambda x, g, w: rms(gather(x).unflatten(1, (4, 4)), g).flatten(1) @ w,
        lambda n: [(5, 16), (4,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "norm of one row": (lambda x, g, w: rms(gather(x), g) @ w, lambda n: [(1, 16), (16,), (16, 6)], (GATHER, ["mm M"])),
    "norm without a weight": (
        lambda x, w: F.layer_norm(gather(x, 1), (16,)) @ w,
        lambda n: [(2, 3, 16), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a scale with more dims than the input": (
        lambda x, s, w: (gather(x) * s).mT @ w,
        lambda n: [(4, 8), (1, 1, 1), (1, 4 * n, 6)],
        (GATHER, ["bmm K"]),
    ),
    "softmax": (lambda x, w: gather(x).softmax(-1) @ w, lambda n: [(4, 16), (16, 6)], (GATHER, ["mm M"])),
    "norm, contracted along the gathered dim": (
        lambda x, g, y: y @ rms(gather(x), g),
        lambda n: [(4, 16), (16,), (6, 4 * n)],
        (GATHER, ["mm K"]),
    ),
    "norm, gathered as columns": (
        lambda x, g, y: y @ rms(gather(x), g).t(),
        lambda n: [(4, 16), (16,), (6, 16)],
        (GATHER, ["mm N"]),
    ),
    "one scale, different on each rank": (
        lambda x, s, w: (gather(x) * s) @ w,
        lambda n: [(4, 16), (1,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a scale for each row": (
        lambda x, s, w: (gather(x) * s) @ w,
        lambda n: [(4, 16), (4 * n, 1), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a scale for each row of a sequence": (
        lambda x, s, w: (gather(x, 1) * s[..., None]) @ w,
        lambda n: [(2, 3, 16), (2, 3 * n), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a scale for each token, the same for all batches": (
        lambda x, s, w: (gather(x, 1) * s[:, None]) @ w,
        lambda n: [(2, 3, 16), (3 * n,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a scale for each batch": (
        lambda x, s, w: (gather(x, 1) * s) @ w,
        lambda n: [(4, 3, 16), (4, 1, 1), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "a mask of rows": (
        lambda x, m, w: gather(x).masked_fill((m > 0)[:, None], 0.0) @ w,
        lambda n: [(4, 16), (4 * n,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "some of the columns": (lambda x, w: gather(x)[:, 3:11] @ w, lambda n: [(4, 16), (8, 6)], (GATHER, ["mm M"])),
    "both halves of the columns, multiplied": (
        lambda x, w: F.silu((y := gather(x).chunk(2, 1))[0]) * y[1] @ w,
        lambda n: [(4, 16), (8, 6)],
        (GATHER, ["mm M"]),
    ),
    "concatenated with other columns": (
        lambda x, y, w: torch.cat([gather(x), y], 1) @ w,
        lambda n: [(4, 16), (4 * n, 3), (19, 6)],
        (GATHER, ["mm M"]),
    ),
    "a residual with all rows": (
        lambda x, y, g, w: rms(gather(x) + y, g) @ w,
        lambda n: [(4, 16), (4 * n, 16), (16,), (16, 6)],
        (GATHER, ["mm M"]),
    ),
    "gathered along the batch": (
        lambda x, w: gather(x) @ w,
        lambda n: [(2, 4, 16), (2 * n, 16, 6)],
        (GATHER, ["bmm B"]),
    ),
    "gathered along the batch, with a bias": (
        lambda x, w, b: torch.baddbmm(b, gather(x), w),
        lambda n: [(2, 4, 16), (2 * n, 16, 6), (2 * n, 4, 6)],
        (GATHER, ["baddbmm B"]),
    ),
    "right operand gathered along the batch": (
        lambda x, w: w @ gather(x),
        lambda n: [(2, 4, 16), (2 * n, 5, 4)],
        (GATHER, ["bmm B"]),
    ),
    "scattered along the batch": (
        lambda x, w, b: scatter(torch.baddbmm(b, x, w) * 2),
        lambda n: [(2 * n, 4, 16), (2 * n, 16, 6), (2 * n, 4, 6)],
        (SCATTER, ["baddbmm B"]),
    ),
    "reduced, cut along the batch": (
        lambda x, w: reduce(torch.bmm(x, w)),
        lambda n: [(2 * n, 4, 16), (2 * n, 16, 6)],
        (REDUCE, ["bmm B"]),
    ),
    "int8, gathered": (
        lambda x, w: torch._int_mm(gather(int8(x)), int8(w)),
        lambda n: [(4, 16), (16, 8)],
        (GATHER, ["int_mm M"]),
    ),
    "int8, contracted along the gathered dim": (
        lambda x, w: torch._int_mm(int8(w), gather(int8(x))),
        lambda n: [(4, 16), (5, 4 * n)],
        (GATHER, ["int_mm K"]),
    ),
    "int8, reduced": (
        lambda x, w: reduce(torch._int_mm(int8(x), int8(w))),
        lambda n: [(9, 16), (16, 8)],
        (REDUCE, ["int_mm M"]),
    ),
    "int8, scaled and scattered": (
        lambda x, w, s: scatter(torch._int_mm(int8(x), int8(w)).double() * s),
        lambda n: [(4 * n, 16), (16, 8), (8,)],
        (SCATTER, ["int_mm M"]),
    ),
    "int8, scattered": (
        lambda x, w: scatter(torch._int_mm(int8(x), int8(w))),
        lambda n: [(4 * n, 16), (16, 8)],
        (SCATTER, ["int_mm M"]),
    ),
    "experts, reduced": (lambda x, w: reduce((x @ w).sum(0)), lambda n: [(3, 7, 16), (3, 16, 8)], (REDUCE, ["bmm M"])),
    "experts, scattered": (
        lambda x, w: scatter((x @ w).sum(0)),
        lambda n: [(3, 4 * n, 16), (3, 16, 8)],
        (SCATTER, ["bmm M"]),
    ),
    "experts, weighted": (
        lambda x, w, s: reduce((x @ w * s).sum(0)),
        lambda n: [(3, 7, 16), (3, 16, 8), (3, 7, 1)],
        (REDUCE, ["bmm M"]),
    ),
    "experts of a sequence, with a bias, weighted": (
        lambda x, w, b, s: reduce((torch.baddbmm(b, x, w).unflatten(1, (2, 5)) * s[..., None]).sum(0)),
        lambda n: [(3, 10, 16), (3, 16, 8), (3, 1, 8), (3, 2, 5)],
        (REDUCE, ["baddbmm M"]),
    ),
    "experts of a sequence, scattered": (
        lambda x, w, s: scatter(((x @ w).unflatten(1, (2, s.shape[2])) * s[..., None]).sum(0), 1),
        lambda n: [(3, 8 * n, 16), (3, 16, 8), (3, 2, 4 * n)],
        (SCATTER, ["bmm M"]),
    ),
    "experts' mean, and a residual": (
        lambda x, w, y, g: scatter((x @ w).mean(0) * g + y),
        lambda n: [(3, 4 * n, 16), (3, 16, 8), (4 * n, 8), (8,)],
        (SCATTER, ["bmm M"]),
    ),
    "columns of two matmuls concatenated, reduced": (
        lambda x, y, w, v: reduce(torch.cat([x @ w, y @ v], 1)),
        lambda n: [(7, 16), (7, 12), (16, 8), (12, 5)],
        (REDUCE, ["mm M", "mm M"]),
    ),
    "columns of three matmuls and an input concatenated, scattered": (
        lambda x, y, w, v, s: scatter(torch.cat([x @ w, torch.cat([x @ v, (x @ w).relu()], 1), y], 1) * s),
        lambda n: [(4 * n, 16), (4 * n, 3), (16, 8), (16, 5), (24,)],
        (SCATTER, ["mm M", "mm M", "mm M"]),
    ),
    "rows of two matmuls concatenated, columns scattered": (
        lambda x, y, w: scatter(torch.cat([x @ w, y @ w], 0), 1),
        lambda n: [(5, 16), (4, 16), (16, 4 * n)],
        (SCATTER, ["mm N", "mm N"]),
    ),
    "columns of two matmuls of a sequence concatenated, scattered": (
        lambda x, w, v: scatter(torch.cat([x @ w, x @ v], 2), 1),
        lambda n: [(2, 2 * n, 16), (16, 8), (16, 5)],
        (SCATTER, ["mm M", "mm M"]),
    ),
    "a loop of experts, reduced": (
        lambda *a: reduce(gated(*a)),
        lambda n: [(7, 16), (7, 3), (3, 16, 4), (3, 4, 16)],
        (REDUCE, ["mm M", "mm M", "mm M"]),
    ),
    "a loop of experts of a sequence, scattered": (
        lambda *a: scatter(gated(*a), 1),
        lambda n: [(2, 3 * n, 16), (2, 3 * n, 2), (2, 16, 4), (2, 4, 16)],
        (SCATTER, ["mm M", "mm M"]),
    ),
    "a loop of experts, columns scattered": (
        lambda *a: scatter(gated(*a), 1),
        lambda n: [(5, 4 * n), (5, 2), (2, 4 * n, 3), (2, 3, 4 * n)],
        (SCATTER, ["mm N", "mm N"]),
    ),
    "a loop of experts, and one for all tokens": (
        lambda x, s, u, d, v, w: reduce(gated(x, s, u, d) + (x @ v).relu() @ w),
        lambda n: [(7, 16), (7, 2), (2, 16, 4), (2, 4, 16), (16, 5), (5, 16)],
        (REDUCE, ["addmm M", "mm M", "mm M"]),
    ),
    "a gate that a matmul computes, reduced": (
        lambda x, g, w: reduce(torch.sigmoid(x @ g) * (x.relu() @ w)),
        lambda n: [(7, 16), (16, 1), (16, 6)],
        (REDUCE, ["mm M"]),
    ),
    "a gate for each row, gathered": (
        lambda x, w, s: gather(x @ w * s),
        lambda n: [(7, 16), (16, 6), (7, 1)],
        ("matmul_all_gather", ["mm M"]),
    ),
    "a mask and a bias of rows, scattered": (
        lambda x, w, s, b: scatter((x @ w).masked_fill(s > 0, 0.0) + b),
        lambda n: [(4 * n, 16), (16, 6), (4 * n, 1), (6,)],
        (SCATTER, ["mm M"]),
    ),
    "a bias for each row of a square result, reduced": (
        lambda x, w, b: reduce(((x @ w).t() + b).contiguous()),
        lambda n: [(6, 16), (16, 6), (6,)],
        (REDUCE, ["mm M"]),
    ),
    "a scalar bias, reduced": (
        lambda x, w, b: reduce(x @ w + b),
        lambda n: [(7, 16), (16, 6), ()],
        (REDUCE, ["addmm M"]),
    ),
    "a scalar bias, scattered": (
        lambda x, w, b: scatter(x @ w + b, 1),
        lambda n: [(7, 16), (16, 4 * n), ()],
        (SCATTER, ["addmm N"]),
    ),
    "a scalar bias, gathered": (
        lambda x, w, b: gather(x @ w + b),
        lambda n: [(7, 16), (16, 6), ()],
        ("matmul_all_gather", ["addmm M"]),
    ),
    "all rows but the last, and all rows in another order": (
        lambda x, w, v: ((y := gather(x))[:-1] @ w, y.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) @ v),
        lambda n: [(4, 16), (16, 6), (16, 5)],
        (GATHER, ["mm M"]),
    ),
    "gathered along the batch, trained": (
        lambda x, w: GatherTokens.apply(x, 0, world()) @ w,
        lambda n: [(2, 4, 16), (2 * n, 16, 6)],
        (GATHER, ["bmm B"]),
    ),
    "experts, trained": (trained_experts, lambda n: [(3, 4 * n, 16), (3, 16, 8)], (SCATTER, ["bmm M"])),
    "a layer, trained": (trained_norm, lambda n: [(2, 3, 16), (16,), (16, 6), (6, 16)], (GATHER, ["mm M"])),
}
TRAINED = {"a layer, trained", "experts, trained", "gathered along the batch, trained"}
"""Programs that tests run with their backward."""


LOOPING = {"norm without a weight", "softmax"}
"""Programs that a test also runs as a looping op. Each rank then applies the row-wise ops to its own rows before it
sends them."""
OWN = {
    "one scale, different on each rank",
    "rms norm",
    "a scalar bias, reduced",
    "a scalar bias, scattered",
    "a scalar bias, gathered",
    "a loop of experts, reduced",
    "a bias for each row of a square result, reduced",
}
"""Some of the programs that no looping op can compute. In the first two, the scale (or the norm's weight) may differ
between ranks. Each receiver must use its own scale, but a looping op would use the sender's. In the next three, the
bias is a scalar. In the last two, a factor or a bias has one value for each row."""


def arguments(name: str, world_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random fp64 inputs of the program ``name`` on the CPU."""
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in PROGRAMS[name][1](world_size)]

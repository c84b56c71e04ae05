# SPDX-License-Identifier: Apache-2.0
"""The ways in which frameworks spell a matmul beside a collective: functions, with inputs for any number of ranks.

Each spelling has a letter, which tests and golden files name. K and L are in ``exchange_spellings``. O is the case
``dgrad and wgrad on one gather`` of ``ring_cases``. The diagrams show nodes of Inductor's post-grad graph. ``gather``,
``scatter`` and ``reduce`` are the collectives ``all_gather_into_tensor``, ``reduce_scatter_tensor`` and ``all_reduce``.
``[view]`` is an optional reshape. ``W`` is the number of ranks.

A. Gather on dim 0, if tokens are the first dim. ::

       gather(x) -> wait -> [view] -> mm -> [view]

B. Gather on another dim, as in sequence parallelism of ``[batch, sequence, hidden]``. The collective joins shards on
   dim 0, so ``all_gather_tensor`` and DTensor reorder its result. ::

       gather(x) -> wait -> split -> W getitems -> cat on dim d -> [view] -> mm

C. B with batch 1: torch reorders the result by a view. ::

       gather(x) -> wait -> view [1, W * s, h] -> [view] -> mm

D. B with sizes that are known at run time only (unbacked): torch writes slices instead of a split. ::

       gather(x) -> wait -> W slices -> cat on dim d [-> slice] -> mm

E. Shards of different sizes in DTensor: ranks pad small shards, and all ranks drop the padding. ::

       constant_pad_nd -> gather -> wait -> slice -> mm

F. Float8 training (torchao, torchtitan): fp8 tensors travel as bytes, and scales are operands of the matmul. ::

       view as uint8 -> A or B -> view as float8 -> _scaled_mm(a, b, scale_a, scale_b)

G. Scatter on dim 0, the counterpart of A. ::

       mm -> [view] -> scatter(y) -> wait

H. Scatter on another dim, the counterpart of B. ::

       mm -> [view] -> split on dim d -> W getitems -> cat on dim 0 -> scatter(y) -> wait

I. Scatter whose collective and wait are both outputs: the partitioner saved the collective for backward. ::

       mm -> scatter(y) -> wait
             scatter(y) -> output

J. All-reduce: row-wise layers without sequence parallelism (Hugging Face ``tp_plan``, vLLM, gpt-fast). ::

       mm -> [view] -> reduce(y) -> wait

K. The change of a DTensor from ``Shard(i)`` to ``Shard(j)``. ::

       mm -> _dtensor.shard_dim_alltoall(y, i, j)

L. All-to-all, before or after a matmul: experts and context parallelism. ::

       all_to_all_single(x, output sizes, input sizes) -> wait -> mm

M. A bias, as in ``nn.Linear``, or sizes that are products of symbols, as in models compiled with ``dynamic=True``. ::

       addmm(bias, x, w) -> reduce -> wait        or        mm -> reduce -> wait -> add bias

N. One gather that several matmuls read (q, k, v; gate, up). The gathered tensor may also be saved for backward. ::

       gather(x) -> wait -> mm, mm, output

O. Backward of a row-wise layer. The gathered gradient is multiplied by the weight (dgrad, gathered on M),
   and contracted with the activations (wgrad, gathered on K). ::

       gather(dy) -> wait -> mm(dy, w.t()), mm(x.t(), dy)

P. The in-place functions of ``torch.distributed``, which Dynamo rewrites to functional ones. ::

       empty, gather(x) -> wait -> copy(empty, wait) -> mm
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.nn.functional as F

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter

Function = Callable[..., Any]
Make = Callable[[int], torch.Tensor]
"""Makes an input for the given number of ranks."""

GATHER, SCATTER, REDUCE, HEAD = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"


def world() -> Any:
    return dist.group.WORLD


def x2(ranks: int = 2) -> torch.Tensor:
    return torch.randn(2 * ranks, 16)


def x3(ranks: int = 2) -> torch.Tensor:
    return torch.randn(2, 2 * ranks, 16)


def batch_of_one(ranks: int = 2) -> torch.Tensor:
    return torch.randn(1, 2 * ranks, 16)


def weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16, 4 * ranks)


def narrow_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16, 6)


def tall_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16 * ranks, 8)


def second_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(4 * ranks, 16)


def bias(ranks: int = 2) -> torch.Tensor:
    return torch.randn(4 * ranks)


def one_gather_two_matmuls(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = all_gather(x, 1, world())
    return gathered @ q, gathered @ k, gathered


def uneven(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = world().size() * (x.shape[0] + 1) - 1
    return all_gather(F.pad(x, (0, 0, 0, 1)), 0, world())[:rows] @ w


def dynamic(x: torch.Tensor, *dims: int) -> torch.Tensor:
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return x


def unbacked(x: torch.Tensor, dim: int) -> torch.Tensor:
    torch._dynamo.decorators.mark_unbacked(x, dim)
    return x


def in_slices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A gather on dim 1, as torch writes it if the sizes of the pieces are unknown at compile time."""
    gathered, rows = all_gather(x, 0, world()), x.shape[0]
    return torch.cat([gathered[i * rows : (i + 1) * rows] for i in range(world().size())], 1) @ w


FP8 = torch.float8_e4m3fn


def fp8_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16 * ranks, 32).to(FP8).t()


def one_scale(ranks: int = 2) -> torch.Tensor:
    return torch.tensor(0.5)


def as_bytes(x: torch.Tensor, dim: int) -> torch.Tensor:
    return all_gather(x.view(torch.uint8), dim, world()).view(FP8)


def scaled(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, w, a, b, out_dtype=torch.bfloat16)


def scattered_and_saved(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The collective and its wait are both outputs."""
    started = torch.ops._c10d_functional.reduce_scatter_tensor(x @ w, "sum", world().size(), world().group_name)
    return started, torch.ops._c10d_functional.wait_tensor(started)


def in_place_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.empty(world().size() * x.shape[0], 16)
    dist.all_gather_into_tensor(out, x)
    return out @ w


def in_place_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0] // world().size(), w.shape[1])
    dist.reduce_scatter_tensor(out, x @ w)
    return out


def in_place_reduce(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    dist.all_reduce(y)
    return torch.relu(y)


SPELLINGS: dict[str, tuple[Function, tuple[Make, ...], tuple[str, int | None, list[str]]]] = {
    "A": (lambda x, w: all_gather(x, 0, world()) @ w, (x2, weight), (GATHER, 0, ["mm M"])),
    "A of three dims": (lambda x, w: all_gather(x, 0, world()) @ w, (x3, weight), (GATHER, 0, ["mm M"])),
    "B": (lambda x, w: all_gather(x, 1, world()) @ w, (x3, weight), (GATHER, 1, ["mm M"])),
    "B on the hidden dim": (lambda x, w: all_gather(x, 2, world()) @ w, (x3, tall_weight), (GATHER, 2, ["mm K"])),
    "C": (lambda x, w: all_gather(x, 1, world()) @ w, (batch_of_one, weight), (GATHER, 0, ["mm M"])),
    "D": (in_slices, (x3, weight), (GATHER, 1, ["mm M"])),
    "E": (uneven, (x2, weight), (GATHER, 0, ["mm M"])),
    "F": (
        lambda x, w, a, b: scaled(as_bytes(x, 0), w, a, b),
        (lambda ranks=2: torch.randn(16, 32).to(FP8), fp8_weight, one_scale, one_scale),
        (GATHER, 0, ["scaled_mm M"]),
    ),
    "F of a sequence, scales of rows": (
        lambda x, w, a, b: scaled(as_bytes(x, 1).flatten(0, 1), w, a, b),
        (
            lambda ranks=2: torch.randn(2, 16, 32).to(FP8),
            fp8_weight,
            lambda ranks=2: torch.rand(2 * 16 * ranks, 1),
            lambda ranks=2: torch.rand(1, 16 * ranks),
        ),
        (GATHER, 1, ["scaled_mm M"]),
    ),
    "F before a scatter, scales of rows": (
        lambda x, w, a, b: reduce_scatter(scaled(x, w, a, b), "sum", 0, world()),
        (
            lambda ranks=2: torch.randn(16 * ranks, 32).to(FP8),
            fp8_weight,
            lambda ranks=2: torch.rand(16 * ranks, 1),
            lambda ranks=2: torch.rand(1, 16 * ranks),
        ),
        (SCATTER, 0, ["scaled_mm M"]),
    ),
    "G": (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
    "G of three dims": (
        lambda x, w: reduce_scatter(x @ w, "sum", 0, world()),
        (lambda ranks=2: torch.randn(ranks, 4, 16), weight),
        (SCATTER, 0, ["mm M"]),
    ),
    "G flattened": (
        lambda x, w: reduce_scatter((x @ w).flatten(0, 1), "sum", 0, world()),
        (x3, weight),
        (SCATTER, 0, ["mm M"]),
    ),
    "H": (lambda x, w: reduce_scatter(x @ w, "sum", 1, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "H on the hidden dim": (
        lambda x, w: reduce_scatter(x @ w, "sum", 2, world()),
        (x3, weight),
        (SCATTER, 1, ["mm N"]),
    ),
    "H of batch 1": (
        lambda x, w: reduce_scatter(x @ w, "sum", 1, world()),
        (batch_of_one, weight),
        (SCATTER, 0, ["mm M"]),
    ),
    "G average": (lambda x, w: reduce_scatter(x @ w, "avg", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
    "I": (scattered_and_saved, (x2, weight), (SCATTER, 0, ["mm M"])),
    "J": (lambda x, w: all_reduce(x @ w, "sum", world()), (x2, weight), (REDUCE, None, ["mm M"])),
    "J of three dims": (lambda x, w: all_reduce(x @ w, "sum", world()), (x3, weight), (REDUCE, None, ["mm M"])),
    "M addmm before a reduction": (
        lambda x, w, b: all_reduce(torch.addmm(b, x, w), "sum", world()),
        (x2, weight, bias),
        (REDUCE, None, ["addmm M"]),
    ),
    "M addmm after a gather": (
        lambda x, w, b: torch.addmm(b, all_gather(x, 0, world()), w),
        (x2, weight, bias),
        (GATHER, 0, ["addmm M"]),
    ),
    "M bias after the collective": (
        lambda x, w, b: all_reduce(x @ w, "sum", world()) + b,
        (x2, weight, bias),
        (REDUCE, None, ["mm M"]),
    ),
    "M sizes are products of symbols, gather": (
        lambda x, w: all_gather(x, 1, world()) @ w,
        (lambda ranks=2: dynamic(x3(ranks), 0, 1), weight),
        (GATHER, 1, ["mm M"]),
    ),
    "M sizes are products of symbols, all-reduce": (
        lambda x, w: all_reduce(x @ w, "sum", world()),
        (lambda ranks=2: dynamic(x3(ranks), 0, 1), weight),
        (REDUCE, None, ["mm M"]),
    ),
    "N": (one_gather_two_matmuls, (x3, weight, narrow_weight), (GATHER, 1, ["mm M", "mm M"])),
    "P all_gather_into_tensor": (in_place_gather, (x2, weight), (GATHER, 0, ["mm M"])),
    "P reduce_scatter_tensor": (in_place_scatter, (x2, weight), (SCATTER, 0, ["mm M"])),
    "P all_reduce": (in_place_reduce, (x2, weight), (REDUCE, None, ["mm M"])),
}

# In each of these spellings, the site is refused or the collective is a near miss.
KEPT: dict[str, tuple[Function, tuple[Make, ...]]] = {
    "D of unbacked sizes": (
        lambda x, w: all_gather(x, 0, world()) @ w,
        (lambda ranks=2: unbacked(x2(ranks), 0), weight),
    ),
    "D of unbacked sizes on dim 1": (
        lambda x, w: all_gather(x, 1, world()) @ w,
        (lambda ranks=2: unbacked(x3(ranks), 0), weight),
    ),
}

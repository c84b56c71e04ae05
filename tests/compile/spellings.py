"""Every spelling of ``integrations`` rows A to P and every structure around a site, as functions of the world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.fake_group import all_gather
from tests.fake_group import all_reduce
from tests.fake_group import reduce_scatter

Function = Callable[..., Any]
Make = Callable[[int], torch.Tensor]
"""An input for a world of that many ranks."""

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
    """Gathered on dim 1 as it is written where the pieces' sizes are not known."""
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
    """The collective is an output beside its wait."""
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
    "H average": (lambda x, w: reduce_scatter(x @ w, "avg", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
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
    "M as a product of symbols, gather": (
        lambda x, w: all_gather(x, 1, world()) @ w,
        (lambda ranks=2: dynamic(x3(ranks), 0, 1), weight),
        (GATHER, 1, ["mm M"]),
    ),
    "M as a product of symbols, all-reduce": (
        lambda x, w: all_reduce(x @ w, "sum", world()),
        (lambda ranks=2: dynamic(x3(ranks), 0, 1), weight),
        (REDUCE, None, ["mm M"]),
    ),
    "N": (one_gather_two_matmuls, (x3, weight, narrow_weight), (GATHER, 1, ["mm M", "mm M"])),
    "P all_gather_into_tensor": (in_place_gather, (x2, weight), (GATHER, 0, ["mm M"])),
    "P reduce_scatter_tensor": (in_place_scatter, (x2, weight), (SCATTER, 0, ["mm M"])),
    "P all_reduce": (in_place_reduce, (x2, weight), (REDUCE, None, ["mm M"])),
}

# Found, or at least reported, and left as they stood.
KEPT: dict[str, tuple[Function, tuple[Make, ...]]] = {
    "D of unbacked sizes": (
        lambda x, w: all_gather(x, 0, world()) @ w,
        (lambda ranks=2: unbacked(x2(ranks), 0), weight),
    ),
    "D of unbacked sizes on dim 1": (
        lambda x, w: all_gather(x, 1, world()) @ w,
        (lambda ranks=2: unbacked(x3(ranks), 0), weight),
    ),
    "K": (lambda x, w: torch.ops._dtensor.shard_dim_alltoall(x @ w, 0, 1, world().group_name), (x2, weight)),
}


class GatherTokens(torch.autograd.Function):
    """Sequence parallel: gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", 0, world())


class GatheredWeight(torch.nn.Module):
    """FSDP: a shard of the weight is a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape or (16, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.weight.dtype) @ all_gather(self.weight, 0, world())


def matmuls_saved() -> Any:
    """Selective checkpointing: what matmuls computed is kept for backward, all else is computed there again."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ScatterTokens(torch.autograd.Function):
    """The other end: reduce-scatter forward, gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, "sum", 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return all_gather(grad.contiguous(), 0, world())


def of_every_kind(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = all_gather(x, 0, world())
    return gathered @ w, torch.addmm(b, gathered, w), left @ gathered.t(), torch.bmm(gathered[None], w[None])


def used_elsewhere(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = all_gather(x, 0, world())
    return gathered @ w, gathered.sum(), gathered


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gathered = all_gather(x, 0, world())
    return F.silu(torch.addmm(b, gathered, gate)) * (gathered @ up)


# What stands around a site; "trained" ones have a forward and a backward graph.
STRUCTURES: dict[str, tuple[Function, tuple[Make, ...]]] = {
    "one gather feeds matmuls of every kind": (of_every_kind, (x2, weight, bias, lambda w: torch.randn(5, 16))),
    "gathered tensor used elsewhere": (used_elsewhere, (x2, weight)),
    "input of the gather is an output": (lambda x, w: ((y := x.relu()), all_gather(y, 0, world()) @ w), (x2, weight)),
    "input of the reduction is an output": (lambda x, w: ((y := x @ w), all_reduce(y, "sum", world())), (x2, weight)),
    "gathered on the right, computed, contracted": (
        lambda x, v, a: a @ all_gather(x @ v, 0, world()),
        (x2, narrow_weight, lambda w: torch.randn(5, 2 * w * w)),
    ),
    "gathered on the right, computed, kept": (
        lambda x, v, q: q @ all_gather(x @ v, 0, world()).t(),
        (x2, narrow_weight, lambda w: torch.randn(5, 6)),
    ),
    "gathered on the right, contracted": (
        lambda x, a: a @ all_gather(x, 0, world()),
        (x2, lambda w: torch.randn(5, 2 * w * w)),
    ),
    "gathered on the right, kept": (lambda x, a: a @ all_gather(x, 0, world()).t(), (x2, lambda w: torch.randn(5, 16))),
    "a sum of matmuls into one scatter": (
        lambda x, w, v: reduce_scatter(x @ w + x.relu() @ v, "sum", 0, world()),
        (x2, weight, weight),
    ),
    "two all-reduces added": (
        lambda x, w, v: all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "sum", world()),
        (x2, weight, weight),
    ),
    "gathered output": (lambda x, w: all_gather(x @ w, 1, world()), (x2, weight)),
    "cast, scale and activation behind a gather": (
        lambda x, w: (all_gather(x, 0, world()) * 3).relu().double() @ w.double(),
        (x2, weight),
    ),
    "bias, scale, activation and cast before a reduction": (
        lambda x, w, b: all_reduce(((x @ w + b) * 3).relu().double(), "sum", world()),
        (x2, weight, bias),
    ),
    "activation behind gathered matmuls": (gated, (x2, weight, weight, bias)),
    "softmax between": (lambda x, w: torch.softmax(all_gather(x, 0, world()), 0) @ w, (x2, weight)),
    "collective without a matmul": (lambda x: all_reduce(x, "sum", world()) * 2, (x2,)),
    "weight gathered for use": (GatheredWeight(), (lambda w: torch.randn(4, 16 * w),)),
    "all-to-all": (lambda x, w: funcol.all_to_all_single(x, None, None, world()) @ w, (x2, weight)),
    "gather and scatter in a row": (
        lambda x, w, v: reduce_scatter((all_gather(x, 0, world()) @ w).relu() @ v, "sum", 0, world()),
        (x2, weight, second_weight),
    ),
    "column-wise layer, trained": (lambda x, w: (GatherTokens.apply(x) @ w).relu(), (x2, weight)),
    "row-wise layer, trained": (lambda x, w: ScatterTokens.apply(x.relu() @ w).relu(), (x2, weight)),
    "row-wise layer, matmuls saved, trained": (
        lambda x, w: checkpoint(
            lambda x, w: ScatterTokens.apply(x.relu() @ w).sin(), x, w, use_reentrant=False, context_fn=matmuls_saved
        ),
        (x2, weight),
    ),
    "column-wise layer, matmuls saved, trained": (
        lambda x, w: checkpoint(
            lambda x, w: (GatherTokens.apply(x.relu()) @ w).sin(), x, w, use_reentrant=False, context_fn=matmuls_saved
        ),
        (x2, weight),
    ),
}

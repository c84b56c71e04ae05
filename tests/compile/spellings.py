"""Every spelling of ``integrations`` rows A to P and every structure around a site, as functions of the world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor
import torch.nn.functional as F

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
    "E": (uneven, (x2, weight), (GATHER, 0, ["mm M"])),
    "G": (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
    "G of three dims": (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (lambda ranks=2: torch.randn(ranks, 4, 16), weight), (SCATTER, 0, ["mm M"])),
    "G flattened": (lambda x, w: reduce_scatter((x @ w).flatten(0, 1), "sum", 0, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "H": (lambda x, w: reduce_scatter(x @ w, "sum", 1, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "H on the hidden dim": (lambda x, w: reduce_scatter(x @ w, "sum", 2, world()), (x3, weight), (SCATTER, 1, ["mm N"])),
    "H of batch 1": (
        lambda x, w: reduce_scatter(x @ w, "sum", 1, world()),
        (batch_of_one, weight),
        (SCATTER, 0, ["mm M"]),
    ),
    "H average": (lambda x, w: reduce_scatter(x @ w, "avg", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
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
    "N": (one_gather_two_matmuls, (x3, weight, narrow_weight), (GATHER, 1, ["mm M", "mm M"])),
    "P all_gather_into_tensor": (in_place_gather, (x2, weight), (GATHER, 0, ["mm M"])),
    "P reduce_scatter_tensor": (in_place_scatter, (x2, weight), (SCATTER, 0, ["mm M"])),
    "P all_reduce": (in_place_reduce, (x2, weight), (REDUCE, None, ["mm M"])),
}



class GatherTokens(torch.autograd.Function):
    """Sequence parallel: gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", 0, world())


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
    "gathered on the right, contracted": (lambda x, a: a @ all_gather(x, 0, world()), (x2, lambda w: torch.randn(5, 2 * w * w))),
    "gathered on the right, kept": (lambda x, a: a @ all_gather(x, 0, world()).t(), (x2, lambda w: torch.randn(5, 16))),
    "a sum of matmuls into one scatter": (
        lambda x, w, v: reduce_scatter(x @ w + x.relu() @ v, "sum", 0, world()),
        (x2, weight, weight),
    ),
    "two all-reduces added": (lambda x, w, v: all_reduce(x @ w, "sum", world()) + all_reduce(x @ v, "sum", world()), (x2, weight, weight)),
    "gathered output": (lambda x, w: all_gather(x @ w, 1, world()), (x2, weight)),
    "cast, scale and activation behind a gather": (lambda x, w: (all_gather(x, 0, world()) * 3).relu().double() @ w.double(), (x2, weight)),
    "bias, scale, activation and cast before a reduction": (
        lambda x, w, b: all_reduce(((x @ w + b) * 3).relu().double(), "sum", world()),
        (x2, weight, bias),
    ),
    "activation behind gathered matmuls": (gated, (x2, weight, weight, bias)),
    "softmax between": (lambda x, w: torch.softmax(all_gather(x, 0, world()), 0) @ w, (x2, weight)),
    "collective without a matmul": (lambda x: all_reduce(x, "sum", world()) * 2, (x2,)),
    "weight gathered for use": (lambda x, w: x @ all_gather(w, 0, world()), (lambda w: torch.randn(4, 16 * w), narrow_weight)),
    "all-to-all": (lambda x, w: funcol.all_to_all_single(x, None, None, world()) @ w, (x2, weight)),
    "gather and scatter in a row": (
        lambda x, w, v: reduce_scatter((all_gather(x, 0, world()) @ w).relu() @ v, "sum", 0, world()),
        (x2, weight, second_weight),
    ),
    "column-wise layer, trained": (lambda x, w: (GatherTokens.apply(x) @ w).relu(), (x2, weight)),
    "row-wise layer, trained": (lambda x, w: ScatterTokens.apply(x.relu() @ w).relu(), (x2, weight)),
}

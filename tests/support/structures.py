# SPDX-License-Identifier: Apache-2.0
"""Functions with different ops before or after a collective. Most of these collectives lead to a site."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.spellings import Function
from tests.support.spellings import Make
from tests.support.spellings import bias
from tests.support.spellings import narrow_weight
from tests.support.spellings import second_weight
from tests.support.spellings import weight
from tests.support.spellings import world
from tests.support.spellings import x2


class GatherTokens(torch.autograd.Function):
    """The input of a sequence-parallel layer: forward gathers, and backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", 0, world())


class GatheredWeight(torch.nn.Module):
    """A layer as FSDP shards it: the parameter is a shard, and the weight is gathered for each use."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape or (16, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.weight.dtype) @ all_gather(self.weight, 0, world())


def matmuls_saved() -> Any:
    """Selective checkpointing: forward saves only the results of matmuls."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ScatterTokens(torch.autograd.Function):
    """The result of a sequence-parallel layer: forward reduce-scatters, and backward gathers."""

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


def sum_of_experts(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """A mixture of experts: each rank computes the part of its own experts, and an all-reduce sums the parts. Ids above
    the last own expert's id belong to other ranks."""
    experts, chosen = w.shape[0], ids.shape[1]
    ordered, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(ordered.float(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    y = torch._grouped_mm(x[order // chosen], w, offs=ends).masked_fill((ordered >= experts).unsqueeze(-1), 0.0)
    y = y * shares.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return all_reduce(y[back].view(x.shape[0], chosen, -1).sum(1), "sum", world())


def loop_of_experts(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As ``sum_of_experts``, but a loop computes each own expert for all tokens. The factor of an expert is 0 for the
    tokens that did not choose it."""
    out = torch.zeros_like(x)
    for e in range(up.shape[0]):
        share = (shares * (ids == e)).sum(-1, keepdim=True)
        out = out + share * (F.silu(x @ up[e]) @ down[e])
    return all_reduce(out, "sum", world())


def uneven_parts(rows: int) -> tuple[list[int], list[int]]:
    """``(sizes of received parts, sizes of sent parts)`` of an all-to-all in which this rank sends all its rows to the
    first rank, and receives as many rows from it."""
    sizes = [rows] + [0] * (dist.get_world_size() - 1)
    return sizes, sizes


# A name describes the ops around the collective. Functions with "trained" in the name have a forward and a backward
# graph.
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
    "sum of experts' rows": (
        sum_of_experts,
        (
            lambda ranks: torch.randn(2 * ranks, 16).bfloat16(),
            lambda ranks: torch.randn(4, 16, 8).bfloat16(),
            lambda ranks: torch.arange(4 * ranks).view(-1, 2) % 6,
            lambda ranks: torch.rand(2 * ranks, 2).bfloat16(),
        ),
    ),
    "loop of experts": (
        loop_of_experts,
        (
            lambda ranks: torch.randn(2 * ranks, 16),
            lambda ranks: torch.arange(4 * ranks).view(-1, 2) % 6,
            lambda ranks: torch.rand(2 * ranks, 2),
            lambda ranks: torch.randn(2, 16, 8),
            lambda ranks: torch.randn(2, 8, 16),
        ),
    ),
    "softmax between": (lambda x, w: torch.softmax(all_gather(x, 0, world()), 0) @ w, (x2, weight)),
    "collective without a matmul": (lambda x: all_reduce(x, "sum", world()) * 2, (x2,)),
    "weight gathered for use": (GatheredWeight(), (lambda w: torch.randn(4, 16 * w),)),
    "all-to-all of uneven parts": (
        lambda x, w: funcol.all_to_all_single(x, *uneven_parts(x.shape[0]), world()) @ w,
        (x2, weight),
    ),
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

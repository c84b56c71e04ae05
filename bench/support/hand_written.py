# SPDX-License-Identifier: Apache-2.0
"""The block of ``bench.support.dtensor_block``, sharded by hand as in Megatron: autograd functions and sliced weights
replace DTensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", ctx.dim, ctx.group), None, None


class ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, "sum", dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return all_gather(grad.contiguous(), ctx.dim, ctx.group), None, None


class Gathered(nn.Module):
    """A module whose input is first gathered along the sequence."""

    def __init__(self, module: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module, self.dim, self.group = module, dim, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(GatherTokens.apply(x, self.dim, self.group))


class RowLinear(nn.Module):
    """A linear layer whose input features are sharded. The partial sums are reduce-scattered along the sequence. Then
    the bias is added once."""

    def __init__(self, linear: nn.Linear, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.dim, self.group = linear.weight, linear.bias, dim, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ScatterTokens.apply(F.linear(x, self.weight), self.dim, self.group)
        return y if self.bias is None else y + self.bias


def shard(block: Any, mesh: DeviceMesh, dim: int) -> nn.Module:
    """Slice ``block``'s weights in place and insert the collectives. Parameters keep their order."""
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def cut(linear: nn.Linear, along: int) -> nn.Linear:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size, along)[rank].contiguous())
        if linear.bias is not None and along == 0:
            linear.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].contiguous())
        return linear

    for linear in (block.attention.wq, block.attention.wk, block.attention.wv, block.mlp.gate, block.mlp.up):
        cut(linear, 0)
    block.attention.wo = RowLinear(cut(block.attention.wo, 1), dim, group)
    block.mlp.down = RowLinear(cut(block.mlp.down, 1), dim, group)
    block.attention, block.mlp = Gathered(block.attention, dim, group), Gathered(block.mlp, dim, group)
    return block


def whole_gradient(parameter: nn.Parameter, shape: torch.Size, mesh: DeviceMesh) -> torch.Tensor:
    """The gradient of the unsharded parameter, of shape ``shape``. Gradients of a sharded parameter's slices are
    joined. Gradients of a replicated parameter are summed, because each covers only its rank's tokens."""
    assert parameter.grad is not None
    grad = parameter.grad.contiguous()
    if grad.shape == shape:
        dist.all_reduce(grad, group=mesh.get_group())
        return grad
    parts = [torch.empty_like(grad) for _ in range(mesh.size())]
    dist.all_gather(parts, grad, group=mesh.get_group())
    return torch.cat(parts, next(d for d, (a, b) in enumerate(zip(grad.shape, shape, strict=True)) if a != b))

# SPDX-License-Identifier: Apache-2.0
"""Data parallelism inside of the compiled graph, as SimpleFSDP writes it. Every parameter is a ``DTensor``, and each
read of it gathers it. So a graph of the model holds a gather before each use of a weight. Its backward holds a
reduction of each gradient::

    shard [w, h / R] -> cast -> all_gather -> mm                     forward
    mm -> cast -> reduce_scatter -> gradient of the shard            backward (all_reduce, if not sharded)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Placement
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from overlap_inductor.torch_compat.functional_collectives import all_reduce

c10d = torch.ops._c10d_functional
_GATHERING = {c10d.all_gather_into_tensor.default, c10d.wait_tensor.default, torch.ops.aten._to_copy.default}


def _gathers_again() -> Any:
    """Contexts of a checkpoint that saves everything but gathered weights, so that the backward gathers again."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if op in _GATHERING else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


class Whole:
    """How a module reads its parameters.

    Attributes:
        dtype: the dtype in which weights are gathered and used, or ``None`` for the parameter's dtype.
        reduced_in: the dtype in which gradients are reduced, or ``None`` for the dtype of the weights.
        again: whether the backward gathers the weights again.
        kept: the number of mesh dims, the last ones, over which a weight stays as it is (tensor parallelism).
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        reduced_in: torch.dtype | None = None,
        again: bool = False,
        kept: int = 0,
    ) -> None:
        self.dtype, self.reduced_in, self.again, self.kept = dtype, reduced_in, again, kept

    def read(self, parameter: DTensor) -> torch.Tensor:
        if self.again:
            return checkpoint(self.gathered, parameter, use_reentrant=False, context_fn=_gathers_again)
        return self.gathered(parameter)

    def gathered(self, parameter: DTensor) -> torch.Tensor:
        dims = parameter.device_mesh.ndim - self.kept
        kept = parameter.placements[dims:]
        whole = parameter.redistribute(
            placements=[*[Replicate()] * dims, *kept], forward_dtype=self.dtype, backward_dtype=self.reduced_in
        )
        return whole.to_local(grad_placements=[*[Partial()] * dims, *kept])


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement] = (Shard(0),),
    dtype: torch.dtype | None = None,
    reduced_in: torch.dtype | None = None,
    again: bool = False,
) -> nn.Module:
    """Make every parameter of ``model`` a ``DTensor`` on ``mesh``. Its module gathers it at each read (``Whole``)."""
    whole = Whole(dtype, reduced_in, again)
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            placed = distribute_tensor(getattr(module, name), mesh, placements)
            module.register_parameter(name, nn.Parameter(placed))
        if names:
            module.__class__ = type(
                f"Parallel{type(module).__name__}", (type(module),), {name: _reader(name, whole) for name in names}
            )
    return model


def _reader(name: str, whole: Whole) -> property:
    return property(lambda module: whole.read(module._parameters[name]))


class SumOverRanks(torch.autograd.Function):
    """Sums over the ranks of a group. With ``later``, sums the gradient and not the tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, later: bool) -> torch.Tensor:
        ctx.group, ctx.later = group, later
        return x.view_as(x) if later else all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return all_reduce(grad, "sum", ctx.group) if ctx.later else grad, None, None


class TensorParallelMlp(nn.Module):
    """Two linear layers on a mesh with dims ``dp`` and ``tp``. Over ``tp``, the first layer's columns and the second
    layer's rows are sharded. Over ``dp``, the other dim of each weight is sharded, and gathered at each read."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(1), Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0), Shard(1)]))
        self.group, self.whole = mesh.get_group("tp"), Whole(kept=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.whole.read(self.up), self.whole.read(self.down)
        hidden = F.relu(F.linear(SumOverRanks.apply(x, self.group, True), up))
        return SumOverRanks.apply(F.linear(hidden, down), self.group, False)


class Block(nn.Module):
    """A norm and an MLP of two linear layers, with a residual connection."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head. It returns the logits of each token."""

    def __init__(self, words: int = 32, width: int = 8, hidden: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

# SPDX-License-Identifier: Apache-2.0
"""A transformer block in sequence-parallel form, sharded by DTensor or by hand, and its comparison with the unsharded
block in fp64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from bench.support import hand_written

HIDDEN, HEAD = 32, 4


@dataclass(frozen=True)
class Variant:
    """Activations are ``[batch, sequence, hidden]``, or ``[sequence, batch, hidden]`` if ``sequence_dim`` is 0."""

    sequence_dim: int
    batch: int
    bias: bool
    checkpointing: str  # a key of CHECKPOINTING
    by_hand: bool = False


class Attention(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.sequence_dim = variant.sequence_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=variant.bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            if self.sequence_dim == 0:
                y = y.transpose(0, 1)
            return y.unflatten(-1, (-1, HEAD)).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x)), is_causal=True)
        y = y.transpose(1, 2).flatten(-2)
        return self.wo(y.transpose(0, 1) if self.sequence_dim == 0 else y)


class Mlp(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=variant.bias) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=variant.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
# The ops whose results checkpointing saves. If it saves the results of scatters, as torchtitan does, backward needs no
# partial sum. If it saves the results of matmuls only, every partial sum is an output of the forward graph, and
# backward scatters the partial sum again.
CHECKPOINTING: dict[str, set[Any]] = {
    "none": set(),
    "full": set(),
    "selective": _MATMULS | {torch.ops._c10d_functional.reduce_scatter_tensor.default},
    "selective, matmuls only": _MATMULS,
}


def _policy(kept: set[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(variant), Mlp(variant)
        self.checkpointing = variant.checkpointing

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.mlp(self.mlp_norm(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return self.inner(x)
        kept = CHECKPOINTING[self.checkpointing]
        context = {"context_fn": partial(create_selective_checkpoint_contexts, partial(_policy, kept))} if kept else {}
        return checkpoint(self.inner, x, use_reentrant=False, **context)  # type: ignore[return-value]


def sharded(block: Block, mesh: DeviceMesh, dim: int) -> nn.Module:
    gathered = partial(PrepareModuleInput, input_layouts=Shard(dim), desired_input_layouts=Replicate())
    plan = {
        "attention_norm": SequenceParallel(sequence_dim=dim),
        "mlp_norm": SequenceParallel(sequence_dim=dim),
        "attention": gathered(),
        "mlp": gathered(),
        **{f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(dim)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(dim)),
    }
    return parallelize_module(block, mesh, plan)


def largest_error(
    mesh: DeviceMesh, variant: Variant, compiler: Callable[[Any], Any], dtype: torch.dtype = torch.float32
) -> tuple[float, str]:
    """``(largest error, name of the tensor that has it)`` among the compiled block's output and gradients on this rank.
    The exact tensors are those of the unsharded block in fp64. An error is relative to the largest element of its exact
    tensor. ``dtype``: that of the compiled block."""
    torch.manual_seed(3)
    device = mesh.device_type
    block = Block(variant)
    reference = copy.deepcopy(block).double().to(device)
    parallel = (hand_written.shard if variant.by_hand else sharded)(block.to(device, dtype), mesh, variant.sequence_dim)
    tokens = 4 * mesh.size()
    shape = (variant.batch, tokens, HIDDEN) if variant.sequence_dim == 1 else (tokens, variant.batch, HIDDEN)
    whole = torch.randn(shape, dtype=torch.float64).to(device)
    target = torch.randn(shape, dtype=torch.float64).to(device)
    part = partial(torch.chunk, chunks=mesh.size(), dim=variant.sequence_dim)
    rank = mesh.get_local_rank()

    local = part(whole)[rank].to(dtype).contiguous().requires_grad_()
    out = compiler(parallel)(local)
    (out * part(target)[rank].to(dtype)).sum().backward()
    exact_in = whole.requires_grad_()
    exact = reference(exact_in)
    (exact * target).sum().backward()
    assert exact_in.grad is not None and local.grad is not None

    found = {"output": (out, part(exact)[rank]), "gradient of the input": (local.grad, part(exact_in.grad)[rank])}
    for p, (name, q) in zip(parallel.parameters(), reference.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else hand_written.whole_gradient(p, q.shape, mesh)
        found[f"gradient of {name}"] = grad, q.grad
    errors = {
        n: ((a.double() - b).abs().max() / b.abs().max()).item() if a.shape == b.shape else float("inf")
        for n, (a, b) in found.items()
    }
    # In exact arithmetic, the gradient of this bias is zero, so its relative error has no meaning.
    errors.pop("gradient of attention.wk.bias", None)
    # The key makes a NaN the largest error, because ``max`` alone may lose a NaN.
    where = max(errors, key=lambda n: float("inf") if math.isnan(errors[n]) else errors[n])
    return errors[where], where

# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel blocks with an all-reduce after their last matmul, compiled and trained as users do. The blocks are
written by hand, or sharded by DTensor.

A case of ``CASES`` builds a computation for ``with_and_without.compared``. The computation takes a backend and returns
named results: outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.with_and_without import Computation

HIDDEN, INNER, TOKENS = 16, 24, 12
Compiled = Callable[..., torch.Tensor]


class _Enter(torch.autograd.Function):
    """The input of matmuls whose weights are cut by columns. Backward sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return all_reduce(grad, "sum", dist.group.WORLD)


class _Leave(torch.autograd.Function):
    """The result of a matmul whose weight is cut by rows. Forward sums it over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Half(nn.Module):
    """Half a layer: a norm, two matmuls (``gated``: three), an all-reduce and the residual."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0, gated: bool = False) -> None:
        super().__init__()
        # The weights are shards, so each rank has its own. The norm's parameters are equal on all ranks.
        own = torch.Generator().manual_seed(1 + dist.get_rank())
        self.norm, self.dropout = norm, dropout
        self.up = nn.Parameter(torch.randn(HIDDEN, INNER, generator=own) / 4)
        self.down = nn.Parameter(torch.randn(INNER, HIDDEN, generator=own) / 4)
        self.gate = nn.Parameter(torch.randn(HIDDEN, INNER, generator=own) / 4) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = _Enter.apply(self.norm(x))
        inner = F.silu(entered @ self.up)
        if self.gate is not None:
            inner = inner * (entered @ self.gate)
        return x + F.dropout(_Leave.apply(inner @ self.down), self.dropout)


class Layers(nn.Module):
    """Halves of layers. ``around`` wraps each half, for example in a checkpoint. ``eps`` is that of the RMS norms."""

    def __init__(self, number: int, around: Callable[..., Any] | None = None, eps: float = 1e-6, **fields: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.RMSNorm(HIDDEN, eps=eps) if i % 2 else nn.LayerNorm(HIDDEN) for i in range(number)]
        self.halves, self.around = nn.ModuleList(Half(norm, **fields) for norm in norms), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            x = half(x) if self.around is None else self.around(half, x)
        return x


def _compiled(module: Callable[..., Any], backend: Any, **keywords: Any) -> Compiled:
    if backend == "eager":
        return module
    return torch.compile(module, backend=backend, fullgraph=True, **{"dynamic": False, **keywords})


def input_of(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


def _step(called: Compiled, model: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward of each input in turn. The parameters' gradients accumulate."""
    found = {}
    for number, x in enumerate(inputs):
        x.grad, out = None, called(x)
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        found |= {f"output {number}": out, f"gradient of input {number}": x.grad}
    return {**found, **_gradients(model)}


def _trained(*shapes: tuple[int, ...], number: int = 3, **fields: Any) -> Computation:
    """Forward and backward of ``number`` halves, with one input for each of ``shapes``."""

    def computation(backend: Any) -> dict[str, torch.Tensor]:
        model = Layers(number, **fields)
        torch.manual_seed(5)
        inputs = [input_of(*shape, seed=i) for i, shape in enumerate(shapes)]
        return _step(_compiled(model, backend), model, *inputs)

    return computation


def _autocast() -> Computation:
    """Weights in fp32, matmuls and collectives in bf16."""
    train = _trained((TOKENS, HIDDEN))

    def computation(backend: Any) -> Mapping[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(backend)

    return computation


def _each_compiled() -> Computation:
    """Each layer has two halves and is compiled by itself."""

    def computation(backend: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(Layers(2) for _ in range(2))
        called = [_compiled(layer, backend) for layer in layers]
        return _step(lambda x: called[1](called[0](x)), layers, input_of(2, TOKENS, HIDDEN))

    return computation


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(tokens: int, **keywords: Any) -> Computation:
    return _trained((tokens, HIDDEN), around=partial(checkpoint, use_reentrant=False, **keywords))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(2 * INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def _dtensor() -> Computation:
    """DTensor with its default layouts: all-reduces, and norms on all tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def computation(backend: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Mlp(), Mlp())
        plan = {f"{i}.{n}": s() for i in (0, 1) for n, s in (("up", ColwiseParallel), ("down", RowwiseParallel))}
        model = parallelize_module(model, mesh, plan)
        return _step(_compiled(model, backend), model, input_of(2, TOKENS, HIDDEN))

    return computation


def _dynamic(*shapes: tuple[int, ...], **fields: Any) -> Computation:
    """One call for each of ``shapes``, the inputs' shapes without the hidden size. ``fields``: those of ``Layers``."""

    def computation(backend: Any) -> dict[str, torch.Tensor]:
        model = Layers(2, **fields)
        inputs = [input_of(*shape, HIDDEN, seed=sum(shape)) for shape in shapes]
        return _step(_compiled(model, backend, dynamic=True), model, *inputs)

    return computation


CASES: dict[str, Callable[[], Computation]] = {
    "[B, S, H], odd, accumulated gradients": partial(_trained, (3, 5, HIDDEN), (3, 5, HIDDEN)),
    # The ranks divide the tokens, but not the sequences. Each all-reduce of the backward adds up two gradients.
    "[B, S, H], odd batch, gated": partial(_trained, (3, 4, HIDDEN), number=2, gated=True),
    "dropout": partial(_trained, (TOKENS, HIDDEN), dropout=0.25),
    "autocast": _autocast,
    "each layer compiled": _each_compiled,
    "checkpointing, odd": partial(_checkpointed, TOKENS + 1),
    "selective checkpointing": partial(
        _checkpointed, TOKENS, context_fn=partial(create_selective_checkpoint_contexts, _policy)
    ),
    "DTensor": _dtensor,
    # Some numbers of tokens are multiples of the number of ranks.
    "dynamic": partial(_dynamic, (TOKENS,), (TOKENS + 1,), (2 * TOKENS,), (TOKENS + 5,)),
    "dynamic, even": partial(_dynamic, (TOKENS,), (2 * TOKENS,)),
    # In the first call, both dims have one symbol, because their sizes are equal.
    "dynamic, [B, S, H]": partial(_dynamic, (5, 5), (5, 7)),
    # A norm without an epsilon divides the rows beyond the last token, which are zero, by zero.
    "dynamic, NaN in the padding": partial(_dynamic, (TOKENS + 1,), eps=0.0),
}

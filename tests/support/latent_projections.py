# SPDX-License-Identifier: Apache-2.0
"""Latent projections as in DeepSeek's attention: narrow matmuls, whole on every rank, between an all-reduce and
column-wise matmuls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

HIDDEN, LATENT = 32, (8, 6)


class LatentProjections(nn.Module):
    """``direct``: a column-wise matmul also reads the norm, so all its rows are needed. ``bias``: the narrow matmuls
    have one."""

    def __init__(self, latent: tuple[int, int] = LATENT, direct: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.down = nn.ModuleList(nn.Linear(HIDDEN, n, bias=bias) for n in latent)
        self.inner = nn.ModuleList(nn.RMSNorm(n, eps=1e-6) for n in latent)
        self.up = nn.ModuleList(nn.Linear(n, HIDDEN, bias=False) for n in latent)
        self.direct = nn.Linear(HIDDEN, HIDDEN, bias=False) if direct else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        y = self.norm(x)
        parts = [up(inner(down(y))) for down, inner, up in zip(self.down, self.inner, self.up, strict=True)]
        total = torch.sigmoid(parts[0]) * parts[1]
        return total if self.direct is None else total + self.direct(y)


def sharded(seed: int = 0, **options: object) -> LatentProjections:
    """The module with random weights, sharded over the default group."""
    torch.manual_seed(seed)
    model = LatentProjections(**options)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "first": RowwiseParallel(input_layouts=Replicate()),
        "up.*": ColwiseParallel(),
        "direct": ColwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)  # type: ignore[return-value]

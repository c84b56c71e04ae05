# SPDX-License-Identifier: Apache-2.0
"""Trains a small sequence-parallel model with an odd vocabulary and a parallel loss. As in torchtitan, one dim of a 2-D
mesh is tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module

from tests.support import with_and_without
from tests.support.gloo_ranks import run_ranks

VOCABULARY, HIDDEN, TOKENS = 101, 16, 12


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.mlp_norm, self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), _Mlp()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        return self.head(self.norm(h + self.mlp(self.mlp_norm(h))))


_PLAN: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def _row(rank: int, world_size: int, tp: int) -> dict[str, Any]:
    def build() -> Callable[[Any], dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
        generator = torch.Generator().manual_seed(rank // tp)
        ids, labels = (torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator) for _ in range(2))

        def computation(backend: Any) -> dict[str, torch.Tensor]:
            torch.manual_seed(0)
            model = parallelize_module(_Model(), mesh["tp"], _PLAN)
            called = model if backend == "eager" else torch.compile(model, backend=backend)
            with loss_parallel():
                loss = F.cross_entropy(called(ids).flatten(0, 1), labels.flatten(0, 1))
                loss.backward()
            return {"loss": loss, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

        return computation

    return with_and_without.compared(build, close=1e-5)


# Thorough only: ``tests/numerics/test_sequence_parallel.py`` trains a similar model on 1 x 2 ranks.
@pytest.mark.thorough
def test_an_odd_vocabulary_on_a_2d_mesh() -> None:
    """The shards of the head have different numbers of columns. The gathered and scattered tensors have equal shapes on
    all ranks, so every rank overlaps."""
    rows = run_ranks(4, _row, 2, timeout=300)
    assert with_and_without.outcome(rows) == "right", rows
    for row in rows:
        assert row["sites"].get("all_gather_matmul overlapped", 0) >= 3, row
        assert row["sites"].get("matmul_reduce_scatter overlapped", 0) >= 3, row

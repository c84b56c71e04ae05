# SPDX-License-Identifier: Apache-2.0
"""Blocks that ranks run with different plans, their inputs, and what a test collects on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce

UNROLLED = {"step_node_budget": 3000}


def ring(**fields: Any) -> AbstractContextManager[Any]:
    """Overlap by schedule ``ring``. If ``fields`` lack ``UNROLLED``, each site becomes one looping op. This op makes
    the transfers that unrolled steps would make, and the graph compiles in a quarter of the time. ``fields`` are fields
    of ``OverlapConfig``."""
    return overlap_inductor.overlap(**{"schedule": "ring", "step_node_budget": 1, "sub_chunks": 4, **fields})


def inputs_of(rank: int, grad: bool = False) -> list[torch.Tensor]:
    """A shard of rows, this rank's columns of a first weight, and its rows of a second one. Shapes are equal on all
    ranks."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).float().requires_grad_(grad)
        for s in ((8, 16), (16, 12), (12, 16))
    ]


def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A block with one gather and one all-reduce."""
    return all_reduce(torch.relu(all_gather(x, 0, dist.group.WORLD) @ a) @ b, "sum", dist.group.WORLD)


def block_on_a_mesh() -> Callable[..., torch.Tensor]:
    """``block`` on a 2 x 2 mesh. It gathers along the mesh's rows and all-reduces along its columns."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = mesh["tp"].get_group(), mesh["dp"].get_group()

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.relu(all_gather(x, 0, rows) @ a) @ b, "sum", columns)

    return function


def wrong(found: torch.Tensor, function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[str]:
    exact = function(*(i.detach().double() for i in inputs))
    error = (found.double() - exact).abs().max().item()
    return [] if error < 1e-3 else [f"off by {error:.3g}"]


def counts() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["overlap_inductor"])


def compare_as_on_gpus() -> None:
    from overlap_inductor.runtime import agreement

    made = agreement.Comparison.__init__

    def init(self: Any, plan: Any, groups: Any, every_call: bool) -> None:
        made(self, plan, groups, False)

    agreement.Comparison.__init__ = init  # type: ignore[method-assign]

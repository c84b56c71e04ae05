# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rewritten training graph saves for its backward. They must not exceed those of the graph as
written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

from overlap_inductor.passes.sequence import gather_again
from tests.support.fake_group import fake_group
from tests.support.reduced_blocks import HIDDEN
from tests.support.reduced_blocks import Layers
from tests.support.reduced_blocks import Mlp
from tests.support.saved_bytes import saved_bytes
from tests.support.sequence_blocks import BLOCKS
from tests.support.sequence_blocks import ReduceForward

TOKENS = 96
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def _by_hand(world_size: int) -> Case:
    """Two halves of Llama layers, with norms and residuals."""
    fn, make = BLOCKS["llama trained"]
    return fn, tuple(t.requires_grad_() for t in make(world_size))


def _sharded(blocks: list[nn.Module], world_size: int) -> Case:
    plan = {f"{i}.{n}": s() for i in (0, 1) for n, s in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    model = parallelize_module(nn.Sequential(*blocks), init_device_mesh("cpu", (world_size,)), plan)
    return model, (torch.randn(1, TOKENS, HIDDEN, requires_grad=True),)


def _dtensor(world_size: int) -> Case:
    return _sharded([Mlp(), Mlp()], world_size)


class _Relus(nn.Module):
    """The backward of a relu needs its result, which the next matmul reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).relu()


def _relus(world_size: int) -> Case:
    return _sharded([_Relus(), _Relus()], world_size)


BUILDS = {"by hand": _by_hand, "DTensor": _dtensor, "relus": _relus}


def _bytes(name: str, world_size: int) -> tuple[int, int]:
    """``(bytes of the graph as written, bytes of the rewritten graph)``."""
    with fake_group(world_size):
        fn, args = BUILDS[name](world_size)
        written = saved_bytes(fn, *args, mode="off")
        return written, saved_bytes(fn, *args, schedule="ring", sequence_parallel="on")


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(
    ("world_size", "hidden"), [(2, False), (4, True)], ids=["2 ranks, kept", "4 ranks, gathered again"]
)
def test_a_rewritten_graph_saves_no_more_bytes(
    world_size: int, hidden: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the forward saves gathered tensors, because the backward's matmuls hide no gather. If they hide the
    gathers, fewer bytes are saved."""
    monkeypatch.setattr(gather_again, "hidden", lambda *args: hidden)
    written, rewritten = _bytes(name, world_size)
    assert 0 < rewritten <= written * (0.9 if hidden else 1)


@pytest.mark.parametrize("budget", [0.9, 0.4])
def test_a_memory_budget_saves_rows(budget: float) -> None:
    """With a budget, the rewritten graph saves rows, though no matmul hides the backward's gathers. The budget is a
    fraction of what the graph as written saves without a budget."""
    written, rewritten = _bytes("by hand", 4)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        _, found = _bytes("by hand", 4)
    assert found < 0.7 * rewritten and found <= budget * written


def _of_a_region(dynamic: bool) -> list[int]:
    """The bytes that ``Layers`` saves as written, rewritten, and rewritten with a budget for a region."""
    x = torch.randn(4 * HIDDEN, HIDDEN, requires_grad=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with fake_group(4):
        model = Layers(3)

        def in_a_region(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.region_activation_memory_budget(0.5):
                return model(x)  # type: ignore[no-any-return]

        on = {"schedule": "ring", "sequence_parallel": "on"}
        return [saved_bytes(model, x, mode="off"), saved_bytes(model, x, **on), saved_bytes(in_a_region, x, **on)]


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="since torch 2.13")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_budget_of_a_region_saves_rows(dynamic: bool) -> None:
    """Every op of the forward must belong to the region, also the ops that compute the number of a rank's rows."""
    written, rewritten, found = _of_a_region(dynamic)
    assert found < 0.7 * rewritten and found <= 0.5 * written


def test_the_gather_of_a_result_is_not_repeated() -> None:
    """The backward reads no gathered tensor, so it needs no rows of the result either."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ReduceForward.apply(x @ w) * 2  # type: ignore[no-any-return]

    with fake_group(2):
        x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        assert saved_bytes(block, x, w, schedule="ring", sequence_parallel="on") == x.nbytes

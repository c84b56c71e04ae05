# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite under Inductor's own passes that overlap collectives with computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import comms
from torch._inductor.fx_passes import overlap_scheduling
from torch.utils import _runtime_estimation

from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.backend import overlap_inductor as overlap_backend
from overlap_inductor.torch_compat.functional_collectives import all_gather
from tests.support import with_and_without
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.reduced_blocks import HIDDEN
from tests.support.reduced_blocks import TOKENS
from tests.support.reduced_blocks import Layers
from tests.support.reduced_blocks import input_of

LIMIT = 1e-5
DISTRIBUTED = "aten_distributed_optimizations"
REORDERING = (
    "reorder_communication_preserving_peak_memory",
    "sink_waits_iterative",
    "reorder_communication_preserving_peak_memory",
)
"""The passes that a comment in ``torch._inductor.config`` recommends."""


@contextmanager
def _scheduled(moved: Counter[str]) -> Iterator[None]:
    """Turn on the pass that schedules the collectives of the fx graph. ``moved`` counts the graphs that it changed. It
    asks for the rates of a GPU, so here each op counts as one millisecond, and memory has a fixed rate."""
    run = overlap_scheduling.OverlapScheduler.run

    def counted(scheduler: Any) -> Any:
        before = [n.name for n in scheduler.gm.graph.nodes]
        result = run(scheduler)
        moved["graphs"] += [n.name for n in result.graph.nodes] != before
        return result

    settings = {
        f"{DISTRIBUTED}.enable_overlap_scheduling": True,
        f"{DISTRIBUTED}.custom_runtime_estimation": lambda node, size: 1.0,
    }
    with (
        torch._inductor.config.patch(settings),
        mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda: 1000),
        mock.patch.object(_runtime_estimation, "get_device_tflops", lambda dtype: 100),
        mock.patch.object(overlap_scheduling.OverlapScheduler, "run", counted),
    ):
        yield


@contextmanager
def _reordered(moved: Counter[str]) -> Iterator[None]:
    """Turn on the passes that reorder the scheduler's nodes. ``moved`` counts the changes of the order."""

    def counted(name: str) -> Callable[[Any], Any]:
        def reorder(nodes: list[Any]) -> Any:
            before = [n.get_name() for n in nodes]
            result = getattr(comms, name)(nodes)
            moved["graphs"] += [n.get_name() for n in result] != before
            return result

        return reorder

    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [counted(name) for name in REORDERING],
    }
    with torch._inductor.config.patch(settings):
        yield


SETTINGS = {"enable_overlap_scheduling": _scheduled, "reorder_for_compute_comm_overlap": _reordered}


class _Model(nn.Module):
    """Layers whose all-reduces are rewritten, two matmuls, and a gather that the passes can move. The gather has a
    group of its own, because our pass fixes the order of the collectives of a group that it overlaps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.group = Layers(2), dist.new_group([0, 1])
        self.up, self.down = (nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4) for _ in range(2))
        self.register_buffer(
            "scale", torch.randn(HIDDEN // 2, generator=torch.Generator().manual_seed(dist.get_rank()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layers(x) @ self.up) @ self.down
        return y * all_gather(self.scale, 0, self.group)


def _results(backend: Any, trains: bool) -> dict[str, torch.Tensor]:
    """The output and, if ``trains``, the gradients."""
    model, x = _Model(), input_of(TOKENS, HIDDEN)
    called = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    with torch.set_grad_enabled(trains):
        output = called(x)
    if not trains:
        return {"output": output}
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "x": x.grad, **gradients}


def _run(rank: int, world_size: int, trains: bool, setting: str) -> dict[str, Any]:
    compile_anew(kernels=setting != "enable_overlap_scheduling")
    moved: Counter[str] = Counter()
    options = {"schedule": "ring", "sequence_parallel": "on"}
    exact = _results("eager", trains)
    with SETTINGS[setting](moved):
        found = _results(lambda gm, inputs: overlap_backend(gm, inputs, options=options), trains)
    reports = reporting.all_reports()
    return {
        "off": max(with_and_without.off(found[key], exact[key]) for key in exact),
        "moved": moved["graphs"],
        "overlapped": sum(s.decision.status == "overlapped" for r in reports for s in r.sites),
        "left": list(with_and_without.all_reduces(reports)["left"]),
        "notices": [notice for r in reports for notice in r.notices],
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_results_are_those_of_eager_pytorch(trains: bool, setting: str) -> None:
    """On a CPU, the passes estimate with the rates of a GPU, so they gain no time. But they do change the order of
    collectives and waits. Each pass must have changed a graph. Results must stay right."""
    for row in run_ranks(2, _run, trains, setting):
        assert row["off"] < LIMIT and row["moved"] and row["overlapped"] and not row["left"] + row["notices"], row

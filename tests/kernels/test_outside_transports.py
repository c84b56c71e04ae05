# SPDX-License-Identifier: Apache-2.0
"""Schedules move their data with transports from outside the package. Each of these transports implements one of the
classes of ``transports.transport``. Kernels run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.wave_groups import parameters as wave_plan
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import collective_times
from tests.support import toy_transports as toy
from tests.support.fused_cases import cases
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.ring_cases import as_tuple
from tests.support.shared_memory import SMALL_TILES
from tests.support.shared_memory import use_shared_memory

SITES = ("gather rows, two matmuls, one with bias, gathered tensor read", "scatter rows", "all-reduce")


def _problems(schedule: str, transport: Any, names: tuple[str, ...], rank: int, world_size: int) -> list[str]:
    problems = []
    config = OverlapConfig(schedule=schedule, transport=transport.name, mode="strict")
    for name in names:
        torch._dynamo.reset()
        function, shapes, _ = cases(world_size)[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(function, backend=interpreted(config, reports), dynamic=False)
        before = transport.carried
        for call in range(2):
            generator = torch.Generator().manual_seed(7 + rank + 100 * call)
            inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).half() for shape in shapes]
            exact, found = as_tuple(function(*(i.double() for i in inputs))), as_tuple(compiled(*inputs))
            for e, f in zip(exact, found, strict=True):
                if f.shape != e.shape or not torch.allclose(f.double(), e, rtol=2e-2, atol=5e-2):
                    problems.append(f"{name} call {call}: {tuple(f.shape)} off by {(f.double() - e).abs().max():.3g}")
        planned = [(p.schedule, p.transport) for r in reports for s in r.sites for p in s.decision.plan]
        if planned != [(schedule, transport.name)]:
            problems.append(f"{name} was planned as {planned}")
        if transport.carried == before:
            problems.append(f"{name}: {transport.name} carried nothing")
    return problems


def _copies(rank: int, world_size: int, folder: str) -> list[str]:
    use_shared_memory(folder)
    with toy.registered(toy.Courier()) as courier:
        # The kernel of schedule ``fused`` occupies every SM. It can use this transport, which needs no SM.
        chunked = _problems("chunked", courier, SITES, rank, world_size)
        return chunked + _problems("fused", courier, SITES[:1], rank, world_size)


def test_copies_by_peers_serve_chunks_and_fused_gathers(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _copies, str(tmp_path), timeout=300)):
        assert not problems, f"rank {rank}: {problems}"


def _collectives(rank: int, world_size: int, folder: str) -> list[str]:
    use_shared_memory(folder)
    symmetric.why_no_kernels = lambda device: None
    collective_times.SIZES, collective_times.REPEATS = (2**9, 2**11), 1
    settings_for = wave_plan.settings_for
    wave_plan.settings_for = lambda *a: {**settings_for(*a), **SMALL_TILES, "free": [0], "halves": False}
    with toy.registered(toy.Choir()) as choir:
        return _problems("wave_groups", choir, SITES[1:], rank, world_size)


def test_whole_collectives_serve_groups_of_waves(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _collectives, str(tmp_path), timeout=300)):
        assert not problems, f"rank {rank}: {problems}"

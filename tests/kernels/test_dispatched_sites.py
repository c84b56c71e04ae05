# SPDX-License-Identifier: Apache-2.0
"""Compiles layers of experts between two exchanges with schedule ``chunked``. The rewritten graphs run on processes
that share memory, with the kernels in Triton's interpreter, forward and backward, compared with fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.support.experts import DispatchedExperts
from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.chunked import experts_ops
from overlap_inductor.report.report import OverlapReport
from tests.support.dispatched_experts import TOLERANCE
from tests.support.dispatched_experts import errors_of
from tests.support.expert_layers import LOADS
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted
from tests.support.shared_memory import use_shared_memory

PATTERN = "all_to_all_experts"


def _check(rank: int, world_size: int, folder: str, tokens: int, dtype: torch.dtype) -> list[str]:
    """Run all loads of the experts, the last one also without workspace. Returns the problems on this rank."""
    use_shared_memory(folder)
    torch._dynamo.config.capture_scalar_outputs = True
    layer = DispatchedExperts(rank, world_size, shared=True)
    reports: list[OverlapReport] = []
    config = OverlapConfig(schedule="chunked", patterns=(PATTERN,), sequence_parallel="off")
    compiled = torch.compile(layer, backend=interpreted(config, reports, compared=True), fullgraph=True)
    problems, ready = [], experts_ops._ready
    for number, loads in enumerate([*LOADS, next(iter(LOADS))]):
        if number == len(LOADS):
            experts_ops._ready = lambda *_: None  # type: ignore[assignment]
        found = errors_of(layer, compiled, rank, world_size, tokens, loads, dtype)
        problems += [f"{loads} {number}: {name} off by {off}" for name, off in found.items() if not off < TOLERANCE]
    experts_ops._ready = ready
    plans = [p.schedule for r in reports for s in r.sites for p in s.decision.plan]
    if plans != ["chunked"] * 2:
        problems.append(f"plans {plans}: {[s.decision.reasons for r in reports for s in r.sites]}")
    return problems + [text for r in reports for text in (*waste(r), *r.notices)]


@pytest.mark.parametrize(("world_size", "tokens", "dtype"), [(2, 13, torch.bfloat16), (4, 9, torch.float32)])
def test_every_load(tmp_path: Path, world_size: int, tokens: int, dtype: torch.dtype) -> None:
    """Ranks have different numbers of tokens. With all tokens on one expert, a part takes several messages."""
    for rank, problems in enumerate(run_ranks(world_size, _check, str(tmp_path), tokens, dtype, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"

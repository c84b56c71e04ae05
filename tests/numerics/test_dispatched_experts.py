# SPDX-License-Identifier: Apache-2.0
"""Layers of experts between two exchanges of rows on gloo ranks, compared with fp64. The layers run forward and
backward, with several loads of the experts."""

from __future__ import annotations

import pytest
import torch

from bench.support.experts import DispatchedExperts
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.dispatched_experts import TOLERANCE
from tests.support.dispatched_experts import LoopedExperts
from tests.support.dispatched_experts import errors_of
from tests.support.expert_layers import LOADS
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

PATTERN = "all_to_all_experts"


def _every_load(
    rank: int, world_size: int, tokens: int, dtype: torch.dtype, shared: bool, sub_chunks: int
) -> tuple[list[str], dict[str, float], list[str]]:
    """``(patterns of the overlapped sites, errors that are too large, problems)`` of a forward and a backward graph."""
    torch._dynamo.config.capture_scalar_outputs = True
    layer = DispatchedExperts(rank, world_size, shared)
    reports: list[OverlapReport] = []
    config = OverlapConfig(schedule="ring", sequence_parallel="off", sub_chunks=sub_chunks)
    compiled = torch.compile(layer, backend=interpreted(config, reports, compared=True), fullgraph=True)
    errors = {}
    for loads in LOADS:
        found = errors_of(layer, compiled, rank, world_size, tokens, loads, dtype)
        errors.update({f"{loads}: {name}": off for name, off in found.items() if not off < TOLERANCE})
    sites = [s.facts.pattern for r in reports for s in r.sites if s.decision.status == "overlapped"]
    return sites, errors, [text for r in reports for text in (*waste(r), *r.notices)]


@pytest.mark.parametrize(
    ("world_size", "tokens", "dtype", "shared", "sub_chunks"),
    [
        # (Thorough only, because ``test_generated_code`` has this dtype.)
        pytest.param(2, 13, torch.bfloat16, False, 3, marks=pytest.mark.thorough),
        (2, 6, torch.float32, True, 2),
        (4, 6, torch.float32, True, 2),
        pytest.param(2, 1, torch.float32, False, 1, marks=pytest.mark.thorough),
    ],
)
def test_every_load(world_size: int, tokens: int, dtype: torch.dtype, shared: bool, sub_chunks: int) -> None:
    """Rows must be computed by the right expert, returned to the right place, and saved in the right order. No rank may
    wait for a piece without rows."""
    for rank, (sites, errors, problems) in enumerate(
        run_ranks(world_size, _every_load, tokens, dtype, shared, sub_chunks, timeout=300)
    ):
        assert (sites, errors, problems) == ([PATTERN] * 2, {}, []), f"rank {rank}"


def _generated(rank: int, world_size: int) -> tuple[list[list[str]], dict[str, float], list[str]]:
    """``_every_load`` in generated code with two loads. Returns the sites of each graph separately."""
    compile_anew(kernels=False)
    torch._dynamo.config.capture_scalar_outputs = True
    layer = DispatchedExperts(rank, world_size, shared=True)
    options = {"schedule": "ring", "sequence_parallel": "off", "mode": "strict", "sub_chunks": 2}
    compiled = torch.compile(layer, backend="overlap_inductor", options=options, fullgraph=True)
    errors = {}
    for loads in ("random", "all tokens on one expert"):
        found = errors_of(layer, compiled, rank, world_size, 16, loads, torch.bfloat16)
        errors.update({f"{loads}: {name}": off for name, off in found.items() if not off < TOLERANCE})
    reports = all_reports()
    sites = [[s.facts.pattern for s in r.sites if s.decision.status == "overlapped"] for r in reports]
    return sites, errors, [text for r in reports for text in (*waste(r), *r.notices)]


def test_generated_code() -> None:
    """Inductor must not reuse a buffer while rows travel, and must not recompile for other loads. It must be able to
    write all sizes into its code."""
    for rank, found in enumerate(run_ranks(2, _generated, timeout=400)):
        assert found == ([[PATTERN]] * 2, {}, []), f"rank {rank}"


def _looped(rank: int, world_size: int, tokens: int) -> tuple[dict[str, float], set[str], list[str]]:
    """``(errors that are too large, reasons that are given, problems)`` of the layer that loops over its experts."""
    compile_anew(kernels=False)
    torch._dynamo.config.capture_scalar_outputs = True
    layer = LoopedExperts(rank, world_size)
    options = {"schedule": "ring", "sequence_parallel": "off"}
    compiled = torch.compile(layer, backend="overlap_inductor", options=options)
    errors = {}
    for loads in LOADS:
        found = errors_of(layer, compiled, rank, world_size, tokens, loads, torch.float32)
        errors.update({f"{loads}: {name}": off for name, off in found.items() if not off < 1e-5})
    reports = all_reports()
    reasons = {m.reason.code for r in reports for m in r.near_misses}
    return errors, reasons, [text for r in reports for text in (*waste(r), *r.notices)]


@pytest.mark.thorough
def test_a_loop_over_experts() -> None:
    """The results must be right, also if experts have no rows or one expert has all tokens. No site may confuse the
    rows of an expert with the rows of a rank."""
    for rank, (errors, reasons, problems) in enumerate(run_ranks(2, _looped, 13, timeout=400)):
        assert (errors, problems) == ({}, []), f"rank {rank}"
        assert reasons, f"rank {rank}: the report gives no reason why the loop has no site"

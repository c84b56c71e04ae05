# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts models of ``transformers`` under their expert-parallel plan. The experts' all-reduces are sites
of both grouped matmuls. All ranks agree, although each rank's graph holds its rank. Logits agree with fp64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support import hugging_face
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.hugging_face import LAYERS
from tests.support.interpreted import interpreted

EXPERTS = "grouped_mm"
REDUCE, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"


def _problems(
    rank: int, world_size: int, family: str, folder: str, generated: bool, fields: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """``(experts' overlapped sites by pattern, problems)`` of this rank."""
    import overlap_inductor
    from overlap_inductor.report import publish as reporting

    model = hugging_face.load(family, folder, "cpu", experts=world_size)
    exact = hugging_face.whole(family, folder, "cpu", experts_implementation="eager")
    ids = hugging_face.ids("cpu")
    # Kernels are built for one model only (by ``make test-thorough``).
    compile_anew(kernels=family == "mixtral")
    reports: list[OverlapReport] = []
    reporting.forget_reports()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        if generated:
            with overlap_inductor.overlap(schedule="ring", **fields):
                found = torch.compile(model, fullgraph=True)(ids).logits
            reports = reporting.all_reports()
        else:
            backend = interpreted(OverlapConfig(schedule="ring", **fields), reports, compared=True)
            found = torch.compile(model, backend=backend, fullgraph=True)(ids).logits
        expected = exact(ids).logits
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    problems = [f"logits are off by {error:.2g}"] * (not error < 1e-5)
    if fell_back := torch._dynamo.utils.counters["overlap_inductor"]["reason.ranks_differ"]:
        problems.append(f"{fell_back} graphs ran without overlap, because ranks differ")
    problems += [text for r in reports for text in (*waste(r), *r.notices)]
    problems += [f"{m.module}: {m.reason}" for r in reports for m in r.near_misses if "experts" in (m.module or "")]
    sites = [s for r in reports for s in r.sites if s.facts.matmuls[0].kind == EXPERTS]
    problems += [f"{s.facts.module} has {s.facts.matmuls}" for s in sites if len(s.facts.matmuls) != 2]
    return dict(Counter(s.facts.pattern for s in sites if s.decision.status == "overlapped")), problems


@pytest.mark.parametrize(
    ("family", "world_size", "generated", "fields", "pattern"),
    [
        pytest.param("mixtral", 2, True, {"sequence_parallel": "off"}, REDUCE, marks=pytest.mark.thorough),
        pytest.param(
            *("mixtral, one layer", 4, False, {"sequence_parallel": "off"}, REDUCE), marks=pytest.mark.thorough
        ),
        pytest.param(
            *("mixtral, one layer", 2, False, {"sequence_parallel": "off", "step_node_budget": 1}, REDUCE),
            marks=pytest.mark.thorough,
        ),
        ("mixtral, one layer", 2, False, {"sequence_parallel": "on"}, SCATTER),
        ("qwen2_moe, one layer", 2, False, {"sequence_parallel": "off"}, REDUCE),
        ("qwen3_moe, one layer", 2, True, {"sequence_parallel": "off"}, REDUCE),
    ],
    ids=["mixtral, generated code", "mixtral, 4 ranks", "looping ops", "sequence", "qwen2", "qwen3"],
)
def test_experts_of_a_model(
    family: str, world_size: int, generated: bool, fields: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    """Catches a layer of experts that is not found, ranks that do not agree, and wrong logits."""
    arguments = family, str(tmp_path), generated, fields
    for rank, (sites, problems) in enumerate(run_ranks(world_size, _problems, *arguments, timeout=500)):
        assert problems == [] and sites == {pattern: 1 if family.endswith(", one layer") else LAYERS}, f"rank {rank}"

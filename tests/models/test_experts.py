# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts models of ``transformers`` under their expert-parallel plan. Each layer of experts must be one
site with both grouped matmuls. All ranks must agree, although each rank's graph holds the rank's number."""

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
from tests.support.heard import Heard
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
    # C++ kernels are built for one model only (by ``make test-thorough``).
    compile_anew(kernels=family == "mixtral")
    reports: list[OverlapReport] = []
    reporting.forget_reports()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        if generated:
            with overlap_inductor.overlap(schedule="ring", sub_chunks=2, **fields):
                found = torch.compile(model, fullgraph=True)(ids).logits
            reports = reporting.all_reports()
        else:
            backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2, **fields), reports, compared=True)
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
        ("mixtral, one layer", 4, False, {"sequence_parallel": "off"}, REDUCE),
        pytest.param(
            *("mixtral, one layer", 2, False, {"sequence_parallel": "off", "step_node_budget": 1}, REDUCE),
            marks=pytest.mark.thorough,
        ),
        ("mixtral, one layer", 2, False, {"sequence_parallel": "on"}, SCATTER),
        ("qwen2_moe, one layer", 2, False, {"sequence_parallel": "off"}, REDUCE),
        ("qwen2_moe, one layer", 4, False, {"sequence_parallel": "off"}, REDUCE),
        pytest.param("qwen3_moe, one layer", 2, True, {"sequence_parallel": "off"}, REDUCE, marks=pytest.mark.thorough),
    ],
    ids=["mixtral, generated code", "mixtral, 4 ranks", "looping ops", "sequence", "qwen2", "qwen2, 4 ranks", "qwen3"],
)
def test_experts_of_a_model(
    family: str, world_size: int, generated: bool, fields: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    """Every layer of experts is found, ranks agree, and logits are right."""
    arguments = family, str(tmp_path), generated, fields
    for rank, (sites, problems) in enumerate(run_ranks(world_size, _problems, *arguments, timeout=500)):
        assert problems == [] and sites == {pattern: 1 if family.endswith(", one layer") else LAYERS}, f"rank {rank}"


def _trained(
    rank: int, world_size: int, family: str, folder: str, limits: tuple[int, ...], fields: list[dict[str, Any]]
) -> dict[str, Any]:
    """Run training steps, each with a recompile limit for rank 0. From a step with limit 1 on, rank 0 compiles no
    further graph. If a frame needs a further graph, the frame runs uncompiled. Each rank has its own switches,
    ``fields``."""
    import overlap_inductor

    model = hugging_face.load(family, folder, "cpu", experts=world_size).train()
    exact = hugging_face.whole(family, folder, "cpu", experts_implementation="eager")
    compile_anew(kernels=False)
    heard, problems, graphs = Heard(), [], []

    def step(run: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = run(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    with overlap_inductor.overlap(schedule="ring", sequence_parallel="off", agreement_timeout=60, **fields[rank]):
        compiled = torch.compile(model)
        for number, limit in enumerate(limits):
            torch._dynamo.config.recompile_limit = 64 if rank else limit
            ids = torch.randint(
                0, hugging_face.VOCABULARY, (1, hugging_face.TOKENS), generator=torch.Generator().manual_seed(number)
            )
            loss, gradients = step(compiled, ids)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            _, wanted = step(model, ids)
            if not abs(loss.double() - exact(ids, labels=ids).loss.detach()) < 1e-5:
                problems.append(f"step {number}: the loss is off")
            for name, gradient in wanted.items():
                if not (gradients[name] - gradient).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max())):
                    problems.append(f"step {number}: the gradient of {name} is off")
    counts = dict(torch._dynamo.utils.counters["overlap_inductor"])
    return {"problems": problems, "warnings": heard.texts, "graphs": graphs, "counts": counts}


# Thorough only, because two other files use smaller layers: ``tests/numerics/test_uncompiled_frames.py`` tests frames
# that run uncompiled, and ``tests/numerics/test_dispatched_experts.py`` tests layers of experts.
@pytest.mark.thorough
def test_training_where_routing_makes_graphs_differ(tmp_path: Path) -> None:
    """Some graphs depend on how many tokens each expert got, so ranks recompile at different times. Ranks must not take
    a peer's recompile for a difference of their plans."""
    arguments = "mixtral, one layer", str(tmp_path), (64, 1, 1), [{}, {}]
    results = run_ranks(2, _trained, *arguments, timeout=400)
    for result in results:
        assert result["problems"] == [] and result["warnings"] == [], result
        assert result["counts"]["sites_overlapped"] > 0 and "reason.ranks_differ" not in result["counts"], result
    first, second = (r["graphs"] for r in results)
    assert first[0] == first[-1] and second[0] < second[-1], "rank 0 compiled after the first step, or rank 1 did not"


# Thorough only: ``test_ranks_that_differ`` trains a smaller block on ranks whose plans differ.
@pytest.mark.thorough
def test_training_with_plans_that_differ(tmp_path: Path) -> None:
    """The plain program of a forward passes a ``DeviceMesh`` on to the backward. The program must not return ``None``
    in its place."""
    arguments = "mixtral, one layer", str(tmp_path), (64,), [{"sub_chunks": 4}, {"sub_chunks": 2}]
    results = run_ranks(2, _trained, *arguments, timeout=400)
    for result in results:
        assert result["problems"] == [] and result["counts"]["reason.ranks_differ"] > 0, result
    assert all("sub_chunks is 4 here and 2 there" in w for r in results for w in r["warnings"]), results
    assert results[0]["warnings"] and not results[1]["warnings"], results

# SPDX-License-Identifier: Apache-2.0
"""Lookups beside all-to-alls on gloo ranks, with random tables and bags, forward and backward. Results must be bitwise
equal to those without overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

PATTERN = "embedding_all_to_all"
LAYOUTS = ("cat", "stack", "tables first")


def _model(rank: int, *arguments: Any) -> DLRM:
    """A model whose dense layers are equal on all ranks."""
    torch.manual_seed(0)
    model = DLRM(*arguments)
    torch.manual_seed(rank)
    for table in model.tables:
        torch.nn.init.normal_(table.weight)
    return model


def _results(model: DLRM, call: Any, arguments: tuple[object, ...], trained: bool) -> list[torch.Tensor]:
    with torch.set_grad_enabled(trained):
        out = call(*arguments)
    if not trained:
        return [out]
    model.zero_grad()
    out.square().sum().backward()
    return [out, *(p.grad.clone() for p in model.parameters())]


def _overlapped(reports: list[OverlapReport]) -> list[int]:
    """The number of lookups in each overlapped site of the pattern."""
    sites = [s for r in reports for s in r.sites if s.facts.pattern == PATTERN and s.decision.status == "overlapped"]
    return [len(s.facts.matmuls) for s in sites]


def _draws(rank: int, world_size: int, examples: int) -> tuple[int, list[str]]:
    """``(number of examples, problems)`` of this rank. All ranks draw the same examples (``derandomize``)."""
    problems: list[str] = []
    count = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        kind=st.sampled_from(["sum", "mean", "embedding", "weighted"]),
        joined=st.sampled_from(LAYOUTS),
        tables=st.integers(1, 6),
        width=st.integers(1, 5),
        mine=st.sampled_from([0, 1, 2, 3, 5]),
        longest=st.integers(0, 4),
        square=st.booleans(),
        sub_chunks=st.integers(1, 3),
        trained=st.booleans(),
    )
    def check(
        kind: str,
        joined: str,
        tables: int,
        width: int,
        mine: int,
        longest: int,
        square: bool,
        sub_chunks: int,
        trained: bool,
    ) -> None:
        nonlocal count
        count += 1
        what = f"{kind} {joined} {tables} tables {width} {mine} {longest} {square} {sub_chunks} {trained}"
        model = _model(rank, tables, 7, width, 3, "sum" if kind == "weighted" else kind, joined)
        generator = torch.Generator().manual_seed(rank)
        batch = batch_of(model, mine, longest, generator, square=square, weighted=kind == "weighted")
        reports: list[OverlapReport] = []
        found = []
        for schedule in ("ring", "keep"):
            torch._dynamo.reset()
            config = OverlapConfig(schedule=schedule, sub_chunks=sub_chunks, patterns=(PATTERN,))
            backend = interpreted(config, reports if schedule == "ring" else [])
            call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
            found.append(_results(model, call, batch.arguments(), trained))
        for i, (one, other) in enumerate(zip(*found, strict=True)):
            if not torch.equal(one, other):
                problems.append(f"{what}: result {i} differs by {(one - other).abs().max()}")
        sites = _overlapped(reports)
        # A table of bags is looked up by one op, for all ranks at once. So with a single such table, no second lookup
        # can hide a transfer. A single ``nn.Embedding`` can be looked up for one rank at a time, so it is a site in
        # forward. In backward it is no site: its gradient is one op, and no other table's gradient hides the transfer.
        if mine and tables > 1 and sites != [tables] * (1 + trained):
            problems.append(f"{what}: sites {sites} {[n.reason for r in reports for n in r.near_misses]}")
        if mine and tables == 1 and kind == "embedding" and sites != [1]:
            problems.append(f"{what}: sites {sites} {[n.reason for r in reports for n in r.near_misses]}")
        problems.extend(f"{what}: {text}" for r in reports for text in r.notices)

    check()
    return count, problems


@pytest.mark.parametrize(
    ("world_size", "examples"), [(2, 4), *(pytest.param(*p, marks=pytest.mark.thorough) for p in ((2, 8), (3, 6)))]
)
def test_random_tables_and_bags(world_size: int, examples: int) -> None:
    """The examples may include empty bags, batches without rows, and tables without indices."""
    for rank, (count, problems) in enumerate(run_ranks(world_size, _draws, examples, timeout=500)):
        assert count >= examples // 2 and not problems, f"rank {rank}: {problems}"

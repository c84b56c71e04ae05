# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on gloo ranks, whose last grouped matmul is computed in parts of the columns. The results are
compared with fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.support.experts import SMALL
from bench.support.experts import Experts
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

TOLERANCE = 4e-2
"""The limit of the relative error. The layers compute in bf16."""
SIZES = replace(SMALL, experts=6, hidden=32)
SPELLINGS: dict[str, dict[str, Any]] = {
    "put": {},
    "negative places": {"places": "negative"},
    "late weights": {"late": True},
}


def _inputs(tokens: int, one: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``one``: all tokens choose one expert."""
    made = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 1 if one else SIZES.experts, (tokens, SIZES.chosen), generator=made)
    x = torch.randn(tokens, SIZES.hidden, generator=made).bfloat16()
    return x, ids, torch.rand(tokens, SIZES.chosen, generator=made).bfloat16()


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def _errors(rank: int, world_size: int, spelling: dict[str, Any]) -> tuple[list[Any], list[float]]:
    experts = Experts(rank, world_size, sizes=SIZES, **spelling)
    reports: list[OverlapReport] = []
    config = OverlapConfig(schedule="column_parts", sequence_parallel="off")
    compiled = torch.compile(experts, backend=interpreted(config, reports, compared=True))
    errors = []
    for tokens, one in ((13, False), (13, True), (1, False)):
        x, ids, weights = _inputs(tokens, one)
        with torch.no_grad():
            exact = experts.whole(x.double(), ids, weights.double())
            errors.append(_off(compiled(x, ids, weights), exact))
    return [(s.decision.status, s.decision.plan[0].schedule) for r in reports for s in r.sites], errors


@pytest.mark.parametrize(
    ("world_size", "spelling"), [(2, "put"), (3, "put"), (2, "negative places"), (2, "late weights")]
)
def test_each_part_holds_its_own_columns(world_size: int, spelling: str) -> None:
    for sites, errors in run_ranks(world_size, _errors, SPELLINGS[spelling], timeout=300):
        assert set(sites) == {("overlapped", "column_parts")}
        assert max(errors) < TOLERANCE


def _generated(rank: int, world_size: int) -> tuple[list[str], dict[int, float], int]:
    """``(status of each site, {tokens: relative error}, number of graphs)`` of generated code for any number of
    tokens."""
    compile_anew(kernels=False)
    experts = Experts(rank, world_size, sizes=SIZES)
    options = {"schedule": "column_parts", "sequence_parallel": "off"}
    compiled = torch.compile(experts, backend="overlap_inductor", options=options, fullgraph=True)
    errors = {}
    for tokens in (12, 7, 64, 2):
        x, ids, weights = _inputs(tokens, False)
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            errors[tokens] = _off(compiled(x, ids, weights), experts.whole(x.double(), ids, weights.double()))
    return [s.decision.status for r in all_reports() for s in r.sites], errors, len(all_reports())


def test_any_number_of_tokens() -> None:
    """The columns are static, so one graph serves all token counts."""
    for statuses, errors, graphs in run_ranks(2, _generated, timeout=400):
        assert statuses == ["overlapped"] and graphs == 1
        assert {tokens: error for tokens, error in errors.items() if not error < TOLERANCE} == {}

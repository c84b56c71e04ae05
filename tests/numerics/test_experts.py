# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on gloo ranks. The ring computes each layer in blocks of tokens. The results are compared with
fp64, for several loads of the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.support.experts import Experts
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.expert_layers import LOADS
from tests.support.expert_layers import ApartExperts
from tests.support.expert_layers import BiasedExperts
from tests.support.expert_layers import inputs
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

TOLERANCE = 4e-2
"""The limit of the relative error. The layers compute in bf16, the only dtype in which ``torch.compile`` traces
``_grouped_mm``."""
SPELLINGS: dict[str, dict[str, Any]] = {
    "put": {},
    "argsort": {"spelling": {"places": "argsort"}},
    "negative places": {"spelling": {"places": "negative"}},
    "late weights": {"spelling": {"late": True}},
    "biases": {"kind": BiasedExperts},
    "gate apart": {"kind": ApartExperts},
}
"""Values of ``_every_load``'s argument ``layer``: the class of the experts (``kind``) and its keyword arguments
(``spelling``)."""
REPEATED = ("put", "argsort", "negative places", "late weights")
"""``put``, and spellings that compute what ``put`` computes. ``test_blocks_of_tokens`` runs them in thorough tests
only, because ``test_any_number_of_tokens`` runs the unrolled steps of ``put``."""


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1)) if exact.numel() else 0.0


def _scattered(x: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(x, "sum", 0, dist.group.WORLD)


def _every_load(
    rank: int, world_size: int, tokens: int, layer: dict[str, Any], scatters: bool, options: dict[str, Any]
) -> tuple[list[tuple[str, bool]], dict[str, float], list[str]]:
    """``([(pattern, whether the steps are unrolled) of each overlapped site], {loads: relative error}, problems)`` of
    one graph."""
    kind = layer.get("kind", Experts)
    experts = kind(rank, world_size, **layer.get("spelling", {}), **({"reduce": _scattered} if scatters else {}))
    reports: list[OverlapReport] = []
    config = OverlapConfig(**{"schedule": "ring", "sub_chunks": 2, **options})
    compiled = torch.compile(experts, backend=interpreted(config, reports))
    errors = {}
    for loads in LOADS:
        x, ids, weights = inputs(tokens, loads)
        with torch.no_grad():
            found, exact = compiled(x, ids, weights), experts.whole(x.double(), ids, weights.double())
        if scatters:
            own = tokens // world_size
            exact = exact[rank * own : (rank + 1) * own]
        errors[loads] = _off(found, exact)
    sites = [
        (s.facts.pattern, s.decision.plan[0].parameters.get("unrolled"))
        for r in reports
        for s in r.sites
        if s.decision.status == "overlapped"
    ]
    return sites, errors, [text for r in reports for text in (*waste(r), *r.notices)]


def _check(world_size: int, *arguments: Any, sites: list[tuple[str, bool]]) -> None:
    for found, errors, problems in run_ranks(world_size, _every_load, *arguments, timeout=300):
        assert found == sites and problems == []
        assert {loads: error for loads, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize(
    ("world_size", "spelling"),
    [
        pytest.param(4, "put", marks=pytest.mark.thorough),
        *(pytest.param(2, spelling, marks=[pytest.mark.thorough] * (spelling in REPEATED)) for spelling in SPELLINGS),
    ],
)
def test_blocks_of_tokens(world_size: int, spelling: str) -> None:
    """Each row must be multiplied by its expert's matrices, scaled by its own weight, and summed for its own token. The
    number of ranks does not divide the number of tokens."""
    _check(
        world_size, 15 if world_size == 4 else 13, SPELLINGS[spelling], False, {}, sites=[("matmul_all_reduce", True)]
    )


@pytest.mark.parametrize(
    ("world_size", "spelling"),
    [
        pytest.param(2, "put", marks=pytest.mark.thorough),
        pytest.param(2, "negative places", marks=pytest.mark.thorough),
        (2, "biases"),
        pytest.param(2, "gate apart", marks=pytest.mark.thorough),
    ],
)
def test_looping_op(world_size: int, spelling: str) -> None:
    """The looping op must compute what the unrolled steps compute."""
    layer, options = SPELLINGS[spelling], {"step_node_budget": 1}
    _check(world_size, 13, layer, False, options, sites=[("matmul_all_reduce", False)])


@pytest.mark.parametrize("budget", [3000, 1])
def test_reduce_scatter(budget: int) -> None:
    sites = [("matmul_reduce_scatter", budget > 1)]
    _check(2, 12, {}, True, {"step_node_budget": budget, "sub_chunks": 2}, sites=sites)


def test_fewer_tokens_than_ranks() -> None:
    _check(4, 3, {}, False, {}, sites=[("matmul_all_reduce", True)])


def _generated(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[str], dict[int, float], int]:
    """``(status of each site, {tokens: relative error}, number of graphs)`` of generated code for any number of
    tokens."""
    compile_anew(kernels=False)
    experts = Experts(rank, world_size)
    options = {"schedule": "ring", "sequence_parallel": "off", **options}
    compiled = torch.compile(experts, backend="overlap_inductor", options=options, fullgraph=True)
    errors = {}
    for tokens in (12, 7, 64, 2):
        x, ids, weights = inputs(tokens)
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            errors[tokens] = _off(compiled(x, ids, weights), experts.whole(x.double(), ids, weights.double()))
    return [s.decision.status for r in all_reports() for s in r.sites], errors, len(all_reports())


@pytest.mark.parametrize("budget", [3000, pytest.param(1, marks=pytest.mark.thorough)])
def test_any_number_of_tokens(budget: int) -> None:
    """Blocks must not keep the size of the first call. They must add no guard, so one graph serves all token counts."""
    for statuses, errors, graphs in run_ranks(2, _generated, {"step_node_budget": budget}, timeout=400):
        assert statuses == ["overlapped"] and graphs == 1
        assert {tokens: error for tokens, error in errors.items() if not error < TOLERANCE} == {}

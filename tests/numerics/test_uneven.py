# SPDX-License-Identifier: Apache-2.0
"""Ranks may hold shards of different sizes. A bias may exist on some ranks and not on others. All ranks must run one
plan, and results must agree with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.ring_cases import as_tuple
from tests.support.together import batches
from tests.support.together import run_together
from tests.support.uneven_cases import cases

WITHOUT_LOOPING_OP = {
    "head of a batch, with bias and activation",
    "gather uneven rows, multiply and contract",
    "gather an uneven sequence, multiply and contract",
    "gather uneven rows, padded with NaN",
    "gather uneven rows, a bias for each row",
    "gather uneven columns and contract",
    "bmm of uneven batches",
    "bmm of uneven batches, padded with NaN",
    "scatter uneven batches",
    "bmm of uneven rows",
    "bmm of an uneven contraction",
}
BIDIRECTIONAL = {"ring_direction": "bidirectional", "sub_chunks": 3}
SAMPLE = [
    "head of a batch, with bias and activation",
    "head of uneven rows of a batch",
    "uneven K, a bias of rows on one rank",
    "uneven K, scattered",
    "uneven K into a column-wise gradient",
    "gather uneven rows, multiply and contract",
    "gather uneven rows, padded with NaN",
    "gather uneven columns and contract",
    "bmm of uneven batches, padded with NaN",
    "scatter uneven batches",
    "bmm of an uneven contraction",
    "scatter a sum of matmuls to an uneven sequence",
]
"""Some cases of each pattern that ``cases`` has, and of each dim that is uneven."""
GENERATED = [
    "head",
    "head of a batch, with bias and activation",
    "uneven K, a bias on one rank",
    "gather an uneven sequence, multiply and contract",
    "gather uneven rows, padded with NaN",
    "scatter a sum of matmuls to uneven rows",
]


def _check(rank: int, world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool) -> list[str]:
    """Run the cases in ``names``; without names, run all but the ``refused`` ones. Returns the problems on this rank.

    ``generated``: run Inductor's code. Otherwise the rewritten graph is interpreted.
    """
    problems = []
    compile_anew(kernels=False)
    named = cases(rank, world_size)
    # With ``step_node_budget``, sites without a looping op are refused. Only the first case with such a site runs.
    refused = sorted(WITHOUT_LOOPING_OP)[1:] if "step_node_budget" in fields else []
    kept = WITHOUT_LOOPING_OP if "step_node_budget" in fields else ()
    for batch in batches(names or [n for n in named if n not in refused]):
        generator = torch.Generator().manual_seed(7 + rank)
        functions, shapes, sites = zip(*(named[name] for name in batch))
        inputs = [
            [torch.randn(s, generator=generator, dtype=torch.float64).float() for s in own_shapes]
            for own_shapes in shapes
        ]
        results, report = run_together(functions, inputs, generated, **fields)
        for name, function, own, found in zip(batch, functions, inputs, results, strict=True):
            for e, f in zip(as_tuple(function(*(i.double() for i in own))), as_tuple(found), strict=True):
                if f.shape != e.shape or not torch.allclose(f.double(), e, rtol=1e-4, atol=4e-4):
                    problems.append(f"{name}: off by {(f.double() - e).abs().max():.3g}")
        problems += [f"{batch}: {text}" for text in waste(report)]
        expected = sum(count for name, count in zip(batch, sites) if name not in kept)
        if report.counters()["sites_overlapped"] != expected:
            said = [f"{n.reason.code}: {n.reason.text}" for n in report.near_misses] + [
                r.text for s in report.sites for r in s.decision.reasons
            ]
            problems.append(f"{batch}: {dict(report.counters())}, expected {expected} sites; {said}")
    return problems


@pytest.mark.parametrize(
    "world_size, fields, names, generated",
    [
        pytest.param(2, {}, None, False, marks=pytest.mark.thorough),
        (2, {"sub_chunks": 2}, GENERATED, True),
        (3, BIDIRECTIONAL, SAMPLE, False),
        pytest.param(3, BIDIRECTIONAL, None, False, marks=pytest.mark.thorough),
        (2, {"step_node_budget": 1}, None, False),
        pytest.param(3, {"step_node_budget": 1}, None, False, marks=pytest.mark.thorough),
    ],
    ids=[
        "2 ranks",
        "2 ranks, generated code",
        "3 ranks",
        "3 ranks, all cases",
        "2 ranks, looping ops",
        "3 ranks, looping ops",
    ],
)
def test_uneven_shards_are_overlapped(
    world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool
) -> None:
    """Ranks must find equal sites and divide them alike. Rows must come from the right shard, and no padding may enter
    a sum."""
    for rank, problems in enumerate(run_ranks(world_size, _check, fields, names, generated, timeout=400)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)

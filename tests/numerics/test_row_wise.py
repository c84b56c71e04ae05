# SPDX-License-Identifier: Apache-2.0
"""Row-wise ops on pieces of the rows must give the results of these ops on all rows. After a gather, they are for
example norms, scales and masks. Before a reduction, they are for example sums over experts and ``cat``. Some programs
have batched matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted
from tests.support.random_programs import outcome
from tests.support.row_wise_programs import LOOPING
from tests.support.row_wise_programs import OWN
from tests.support.row_wise_programs import PROGRAMS
from tests.support.row_wise_programs import TRAINED
from tests.support.row_wise_programs import arguments

FIELDS: dict[int, dict[str, Any]] = {
    2: {"sub_chunks": 3},
    3: {"ring_direction": "bidirectional", "numerics": "allow_hop_rounding", "sub_chunks": 3},
}
ONE_OP = {"step_node_budget": 1}


def _wrong(
    name: str, fn: Callable[..., Any], inputs: list[torch.Tensor], fields: dict[str, Any], trains: bool
) -> list[str]:
    def program(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = fn(*tensors)
        return results if isinstance(results, tuple) else (results,)

    torch._dynamo.reset()
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring", **fields), reports)
    with torch.set_grad_enabled(trains):
        exact, found = (
            outcome(program, inputs, trains),
            outcome(torch.compile(program, backend=backend, dynamic=False), inputs, trains),
        )
    wrong = [
        f"{name} {fields}: result {i} is off by {(e - f).abs().max()}"
        for i, (e, f) in enumerate(zip(exact, found, strict=True))
        if not _close(e, f)
    ]
    wrong += [f"{name} {fields}: {text}" for r in reports for text in (*waste(r), *r.notices)]
    statuses = [s.decision.status for s in reports[0].sites]
    if set(statuses) != {"refused" if fields is ONE_OP and name in OWN else "overlapped"}:
        wrong.append(f"{name} {fields}: {statuses} {[m.reason.text for m in reports[0].near_misses]}")
    return wrong


def _close(exact: torch.Tensor, found: torch.Tensor) -> bool:
    if not exact.is_floating_point():
        return torch.equal(exact, found)
    return exact.shape == found.shape and bool((exact - found).abs().max() <= 1e-9 * max(1.0, float(exact.abs().max())))


def check(rank: int, world_size: int, names: list[str]) -> list[str]:
    compile_anew()
    problems: list[str] = []
    for name in names:
        fn, _, _ = PROGRAMS[name]
        # With ``ONE_OP``, programs in ``LOOPING`` run as one looping op, and sites of programs in ``OWN`` are refused.
        for fields in (FIELDS[world_size], *([ONE_OP] if name in LOOPING | OWN else [])):
            problems += _wrong(
                name, fn, arguments(name, world_size, torch.Generator().manual_seed(rank)), fields, name in TRAINED
            )
    return problems


SAMPLE = [
    "rms norm, and the gathered tensor",
    "layer norm of a sequence",
    "norm without a weight",
    "a scale with more dims than the input",
    "norm, gathered as columns",
    "a scale for each row of a sequence",
    "a mask of rows",
    "both halves of the columns, multiplied",
    "gathered along the batch, with a bias",
    "int8, scaled and scattered",
    "experts of a sequence, with a bias, weighted",
    "columns of two matmuls concatenated, reduced",
    "a loop of experts, reduced",
    "a loop of experts of a sequence, scattered",
    "a loop of experts, and one for all tokens",
    "a bias for each row of a square result, reduced",
    "a layer, trained",
]
"""Some programs of each kind. ``tests/compile/test_row_wise.py`` checks the graphs of all programs."""


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, SAMPLE),
        pytest.param(2, [name for name in PROGRAMS if name not in SAMPLE], marks=pytest.mark.thorough),
        pytest.param(3, list(PROGRAMS), marks=pytest.mark.thorough),
    ],
    ids=["2 ranks", "2 ranks, other programs", "3 ranks"],
)
def test_overlap_does_not_change_the_programs_results(world_size: int, names: list[str]) -> None:
    """Operands must be cut at the right rows, or stay whole. No term may be added twice."""
    for rank, problems in enumerate(run_ranks(world_size, check, names, timeout=400)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)

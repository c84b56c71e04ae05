# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks pass their keys and values on, or gather them, and compute attention meanwhile. The output is compared
with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.context_parallel import exact
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.rotated_attention import places
from tests.support.rotated_attention import rotation
from tests.support.rotated_attention import token_ring
from tests.support.rotated_attention import torch_ring

OWN = 6
CASES: tuple[tuple[Any, str, bool, bool], ...] = (
    (torch_ring, "alltoall", False, False),
    (torch_ring, "alltoall", True, True),
    (torch_ring, "alltoall", True, False),
    (torch_ring, "allgather", True, True),
    (torch_ring, "allgather", False, False),
    (token_ring, "alltoall", False, False),
    (token_ring, "alltoall", True, False),
)
"""``(layer, rotate method, causal, balanced)``. If ``balanced``, each rank has tokens of both halves of the sequence.
Causal attention then gives all ranks equal work."""
SAMPLE = (CASES[1], CASES[2], CASES[3], CASES[6])
"""Both layers, both methods, and causal attention with and without balance. (Attention without a causal mask attends to
more blocks in the same way.)"""


class _Problem:
    """A rank's queries, keys and values, and its output in fp64. All ranks draw the same whole tensors, and each keeps
    its own tokens."""

    def __init__(self, rank: int, ranks: int, causal: bool, balanced: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(ranks)
        whole = [torch.randn(2, 2, ranks * OWN, 8).mul(2).to(dtype) for _ in range(3)]
        mine = places(rank, ranks, OWN, balanced)
        self.own = [x[:, :, mine].contiguous() for x in whole]
        mask = mine[:, None] >= torch.arange(ranks * OWN) if causal else None
        self.expected = exact(self.own[0], whole[1], whole[2], mask)

    def error(self, call: Any, causal: bool) -> float:
        with torch.no_grad():
            return float((call(*self.own, causal).double() - self.expected).abs().max())


def _expected_sites(ranks: int, rank: int, layer: Any, method: str, causal: bool, balanced: bool) -> int:
    """The number of sites on this rank. Each step in which this rank attends to a block, while the ranks pass their
    blocks on, is a site. In the last step, the ranks pass nothing on. With an all-gather, there is one site."""
    if method == "allgather":
        return 1
    return min(ranks - 1, rank + 1) if causal and not balanced else ranks - 1


def _compared(rank: int, ranks: int, cases: tuple[Any, ...]) -> list[str]:
    """What went wrong on this rank in the rewritten graphs."""
    problems = []
    for i, (layer, method, causal, balanced) in enumerate(cases):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        problem = _Problem(rank, ranks, causal, balanced, dtype)
        text = f"{layer.__name__} {method} causal={causal} balanced={balanced} {dtype}"
        with rotation(method, balanced):
            torch._dynamo.reset()
            reports: list[OverlapReport] = []
            backend = interpreted(OverlapConfig(schedule="early_start", sequence_parallel="off"), reports)
            error = problem.error(torch.compile(layer, backend=backend, dynamic=False, fullgraph=True), causal)
            plain = problem.error(layer, causal)
        found = [site.decision.status for report in reports for site in report.sites]
        if found != ["overlapped"] * _expected_sites(ranks, rank, layer, method, causal, balanced):
            problems.append(f"{text}: {found}, {[m.reason for r in reports for m in r.near_misses]}")
        # The program itself attends to one block at a time and merges the results, so overlap adds nearly no error.
        if not error <= 1.01 * plain + 4 * torch.finfo(dtype).eps:
            problems.append(f"{text}: error {error}, without overlap {plain}")
    # With causal attention, a rank does not wait for blocks that it skips, so it may end before its peers. Without the
    # barrier, the peers would then lose their connection to this rank.
    dist.barrier()
    return problems


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, CASES, marks=pytest.mark.thorough),
        (3, SAMPLE),
        pytest.param(3, tuple(c for c in CASES if c not in SAMPLE), marks=pytest.mark.thorough),
    ],
    ids=["2 ranks", "3 ranks", "3 ranks, other cases"],
)
def test_rotated_attention(ranks: int, cases: tuple[Any, ...]) -> None:
    """No attention may read a block before it has arrived, or merge wrong blocks."""
    assert run_ranks(ranks, _compared, cases, timeout=500) == [[]] * ranks


def _generated(rank: int, ranks: int, cases: tuple[Any, ...]) -> list[str]:
    """What went wrong on this rank in generated code. In the unbalanced causal case, ranks have different graphs."""
    compile_anew()
    problems = []
    for layer, causal, balanced in cases:
        torch._dynamo.reset()
        problem = _Problem(rank, ranks, causal, balanced, torch.float32)
        before = len(all_reports())
        with rotation("alltoall", balanced), overlap_inductor.overlap(schedule="early_start", sequence_parallel="off"):
            call = torch.compile(layer, dynamic=False, fullgraph=True)
            errors = [problem.error(call, causal) for _ in range(2)]
        reports = all_reports()[before:]
        overlapped = [s.decision.status for r in reports for s in r.sites]
        if not overlapped or set(overlapped) != {"overlapped"}:
            problems.append(f"{layer.__name__} {balanced}: {overlapped}")
        if not max(errors) <= 1e-5:
            problems.append(f"{layer.__name__} {balanced}: errors {errors}")
    dist.barrier()
    return problems


@pytest.mark.parametrize(
    "cases",
    [
        ((torch_ring, True, False), (token_ring, True, False)),
        pytest.param(((torch_ring, True, True),), marks=pytest.mark.thorough),
    ],
    ids=["unbalanced", "balanced"],
)
def test_generated_code(cases: tuple[Any, ...]) -> None:
    """Ranks must issue exchanges in one order, and Inductor must not reuse a buffer too early."""
    assert run_ranks(3, _generated, cases, timeout=500) == [[]] * 3

# SPDX-License-Identifier: Apache-2.0
"""Runs the candidate of ``bench.support.gemv`` on processes that share memory, in Triton's interpreter, against fp64.

(The interpreter's ``tl.dot`` is wrong for bf16. On GPUs ``bench.small_message`` checks bf16 before it measures.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.support import gemv
from bench.support.gemv import GemvParameters
from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

SMALL = SmallParameters(False, 32, 4)


@dataclass(frozen=True)
class Case:
    """Three calls in one slot, one after the other."""

    two_shot: bool
    world_size: int
    rows: int
    columns: int
    inner: int = 40
    splits: int = 1
    transposed: bool = True

    @property
    def parameters(self) -> GemvParameters:
        return GemvParameters(self.two_shot, 16, self.splits, 16, 1)

    @property
    def need(self) -> tuple[int, int, str]:
        own = gemv.needed(self.parameters, self.world_size, self.rows, self.columns, 2)
        small = small_plan.needed(SMALL, self.world_size, self.rows, self.columns, 2)
        return max(own[0], small[0]), max(own[1], small[1]), HALVES


CASES = {
    "one-shot, 1 row": Case(False, 2, 1, 40),
    "one-shot, 5 rows, three ranks, split": Case(False, 3, 5, 24, splits=2),
    "one-shot, 16 rows, row-major weight": Case(False, 2, 16, 40, transposed=False),
    "one-shot, 64 rows, more blocks than steps": Case(False, 2, 64, 24, splits=4),
    "two-shot, 1 row, three ranks, split": Case(True, 3, 1, 72, splits=2),
    "two-shot, 5 rows, a rank that owns no tile": Case(True, 3, 5, 24),
    "two-shot, 16 rows, row-major weight, split": Case(True, 2, 16, 40, splits=3, transposed=False),
    "two-shot, 64 rows": Case(True, 2, 64, 40),
}


def _launch(workspace: SharedWorkspace, rank: int, patience_ns: int = 1_000_000_000) -> Launch:
    launch = workspace.launch(rank, patience_ns)
    return replace(launch, slot=replace(launch.slot, protocol=HALVES))


def _rank(
    rank: int, workspace: SharedWorkspace, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = _launch(workspace, rank)
    weight = w[rank].t() if case.transposed else w[rank].t().contiguous()
    for call in range(len(x)):
        out[call, rank] = gemv.matmul_all_reduce(x[call, rank], weight, launch, case.parameters)
        assert not launch.slot.queues.any() and launch.slot.calls.tolist() == [call + 1]
        launch.faults.check()


def _late_rank(rank: int, *args: Any) -> None:
    """Run ``_rank``, but let rank 1 read tiles only some time after it has seen their flags."""
    if rank == 1:
        wait = gemv.wait_for_all

        def slowly(*arguments: Any) -> None:
            wait(*arguments)
            time.sleep(0.1)

        gemv.wait_for_all = slowly
    _rank(rank, *args)


def _beside_small_messages(
    rank: int, workspace: SharedWorkspace, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    """Calls of ``small_message`` come between calls of the candidate, in the same slot."""
    launch = _launch(workspace, rank)
    for call in range(len(x)):
        if call % 2:
            product = (x[call, rank].float() @ w[rank].t().float()).to(torch.float16)
            out[call, rank] = small_message.all_reduce(product, launch, SMALL)
        else:
            out[call, rank] = gemv.matmul_all_reduce(x[call, rank], w[rank].t(), launch, case.parameters)


def _check(case: Case, function: Callable[..., None] = _rank) -> None:
    generator = torch.Generator().manual_seed(case.rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float16).share_memory_()

    x = random(3, case.world_size, case.rows, case.inner)
    w = random(case.world_size, case.columns, case.inner)
    out = shared(3, case.world_size, case.rows, case.columns, dtype=torch.float16, fill=float("nan"))
    nbytes, signals, _ = case.need
    run_ranks(case.world_size, function, SharedWorkspace.of(case.world_size, nbytes, signals), x, w, out, case)
    exact = torch.einsum("crmk,rnk->cmn", x.double(), w.double())
    for rank in range(case.world_size):
        assert torch.allclose(out[:, rank].double(), exact, rtol=2e-3, atol=2e-2), rank
    # Equal bits on all ranks, whatever their order of arrival.
    assert torch.equal(out, out[:, :1].expand_as(out))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64_and_among_ranks(name: str) -> None:
    _check(CASES[name])


def test_a_rank_that_reads_late_gets_the_tile_of_its_own_call() -> None:
    """When the late rank reads its only tile, its peer is already in the next call, which writes to the other half.
    (Two-shot cannot come so far here, because the interpreter runs one block after the other.)"""
    _check(Case(False, 2, 2, 16), _late_rank)


@pytest.mark.parametrize("two_shot", [False, True])
def test_small_messages_may_use_the_same_slot(two_shot: bool) -> None:
    _check(Case(two_shot, 3, 3, 24), _beside_small_messages)


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_peer_that_never_comes(two_shot: bool) -> None:
    """All blocks of the kernel end, and the result is NaN where a tile was given up. The next call raises an error."""
    launch = _launch(SharedWorkspace.of(3, 20_000, 8), 0, patience_ns=20_000)
    x, w, p = torch.zeros(2, 16).half(), torch.zeros(32, 16).half().t(), GemvParameters(two_shot, 16, 2, 16, 1)
    assert gemv.matmul_all_reduce(x, w, launch, p).isnan().all()
    assert not launch.slot.queues.any()
    with pytest.raises(TransferError, match="timed out waiting for partial sums from rank 1: expected call 1"):
        gemv.matmul_all_reduce(x, w, launch, p)
    assert launch.slot.calls.tolist() == [1]


def test_a_call_that_the_kernel_cannot_run_is_refused() -> None:
    launch = _launch(SharedWorkspace.of(2, 4096, 8), 0)
    x, w, p = torch.zeros(4, 16).half(), torch.zeros(32, 16).half().t(), GemvParameters(False, 16, 1, 16, 1)
    with pytest.raises(UnsupportedError, match="65 rows; expected 1 to 64"):
        gemv.matmul_all_reduce(torch.zeros(65, 16).half(), w, launch, p)
    with pytest.raises(UnsupportedError, match="cannot multiply"):
        gemv.matmul_all_reduce(x.bfloat16(), w, launch, p)
    with pytest.raises(UnsupportedError, match="its slot has"):
        gemv.matmul_all_reduce(torch.zeros(64, 16).half(), w, launch, p)
    assert launch.slot.calls.tolist() == [0]

# SPDX-License-Identifier: Apache-2.0
"""Runs the small-message kernels on processes that share memory. Triton's interpreter runs a kernel's blocks one after
the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels import small_message as kernels
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.lowerings.small_message.parameters import needed
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """Calls in one part (slot) of the workspace, one after the other. ``rows``: the rows of each call."""

    two_shot: bool
    world_size: int
    rows: tuple[int, ...]
    columns: int
    segment: int
    norm: bool = True
    average: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def parameters(self) -> SmallParameters:
        return SmallParameters(self.two_shot, self.segment, 4)

    @property
    def need(self) -> tuple[int, int, str]:
        return needed(self.parameters, self.world_size, max(self.rows), self.columns, 2)


CASES = {
    "one-shot": Case(False, 2, (3, 1, 3, 2, 3), 64, 32),
    "one-shot, three ranks, a last segment that is shorter": Case(False, 3, (2, 5, 1, 5), 72, 32),
    "one-shot, one segment per row, fp16": Case(False, 2, (4, 2, 4), 40, 64, dtype=torch.float16),
    "one-shot, sum alone": Case(False, 3, (1, 4, 4, 2), 48, 16, norm=False),
    "one-shot, average": Case(False, 2, (3, 3, 3), 24, 16, norm=False, average=True),
    "two-shot": Case(True, 2, (4, 2, 6, 6), 64, 32),
    "two-shot, three ranks, calls in which not every rank owns a row": Case(True, 3, (5, 1, 7, 2, 6), 72, 32),
    "two-shot, more segments than ranks": Case(True, 2, (3, 4, 1), 128, 16),
    "two-shot, sum alone": Case(True, 3, (4, 1, 6, 5), 48, 16, norm=False),
    "two-shot, average, fp16": Case(True, 2, (5, 2, 4), 40, 16, norm=False, average=True, dtype=torch.float16),
}


def _launch(workspace: SharedWorkspace, rank: int, patience_ns: int = 1_000_000_000) -> Launch:
    launch = workspace.launch(rank, patience_ns)
    return replace(launch, slot=replace(launch.slot, protocol=HALVES))


def _rank(
    rank: int,
    workspace: SharedWorkspace,
    product: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    case: Case,
) -> None:
    launch, parameters = _launch(workspace, rank), case.parameters
    for call, rows in enumerate(case.rows):
        own = product[call, rank, :rows].contiguous()
        if case.norm:
            found = small_message.all_reduce_norm(
                own, residual[call, :rows].contiguous(), weight, EPS, launch, parameters
            )
        else:
            found = (small_message.all_reduce(own, launch, parameters, case.average),)
        for i, tensor in enumerate(found):
            out[call, rank, i, :rows] = tensor
        assert not launch.slot.queues.any() and launch.slot.calls.tolist() == [call + 1]
        launch.faults.check()


def _late_rank(rank: int, *args: Any) -> None:
    """Run ``_rank``, but let rank 1 read rows only some time after it has seen their flags."""
    if rank == 1:
        wait = kernels.wait_for_all

        def slowly(*arguments: Any) -> None:
            wait(*arguments)
            time.sleep(0.1)

        kernels.wait_for_all = slowly
    _rank(rank, *args)


def _exact(case: Case, product: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    total = product.double().sum(0) / (case.world_size if case.average else 1)
    if not case.norm:
        return [total]
    added = total + residual.double()
    return [added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + EPS) * weight.double(), added]


def _check(case: Case, function: Callable[..., None] = _rank) -> None:
    calls, rows = len(case.rows), max(case.rows)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype).share_memory_()

    product, residual, weight = (
        random(calls, case.world_size, rows, case.columns),
        random(calls, rows, case.columns),
        random(case.columns),
    )
    out = shared(calls, case.world_size, 2, rows, case.columns, dtype=case.dtype, fill=float("nan"))
    nbytes, signals, _ = case.need
    run_ranks(
        case.world_size,
        function,
        SharedWorkspace.of(case.world_size, nbytes, signals),
        product,
        residual,
        weight,
        out,
        case,
    )
    for call, m in enumerate(case.rows):
        exact = _exact(case, product[call, :, :m], residual[call, :m], weight)
        for rank in range(case.world_size):
            for i, tensor in enumerate(exact):
                assert torch.allclose(out[call, rank, i, :m].double(), tensor, rtol=2e-2, atol=3e-2), (call, rank, i)
        assert torch.equal(
            out[call, :, : len(exact), :m], out[call, :1, : len(exact), :m].expand_as(out[call, :, : len(exact), :m])
        )


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64_and_among_ranks(name: str) -> None:
    _check(CASES[name])


LATE = {
    "one-shot": replace(CASES["one-shot"], rows=(2, 2, 1, 2)),
    "one-shot, sum alone": replace(CASES["one-shot, sum alone"], rows=(1,) * 4, segment=64),
    "two-shot": replace(CASES["two-shot"], rows=(2, 3, 1)),
}


@pytest.mark.parametrize("name", LATE)
def test_a_rank_that_reads_late_gets_the_rows_of_its_own_call(name: str) -> None:
    """Before its last read, the late rank has sent all that its peers wait for. So the peers may be in their next call,
    which writes to the other half of the workspace."""
    _check(LATE[name], _late_rank)


def test_the_kernel_rounds_where_a_model_rounds() -> None:
    """The kernel rounds wherever separate ops would round, so its results are bitwise equal to theirs. (The test uses
    fp16, because the interpreter truncates bf16.)"""
    case = replace(CASES["one-shot"], dtype=torch.float16)
    generator = torch.Generator().manual_seed(2)
    product, residual, weight = (
        (4 * torch.randn(*s, generator=generator)).half().share_memory_() for s in ((5, 2, 3, 64), (5, 3, 64), (64,))
    )
    out = shared(5, 2, 2, 3, 64, dtype=torch.float16)
    nbytes, signals, _ = case.need
    run_ranks(2, _rank, SharedWorkspace.of(2, nbytes, signals), product, residual, weight, out, case)
    added = residual[0] + product[0].float().sum(0).half()
    x = added.float()
    normed = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).half()
    assert torch.equal(out[0, 0, 1], added) and torch.equal(out[0, 0, 0], normed)


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_peer_that_never_comes(two_shot: bool, norm: bool) -> None:
    """All blocks of the kernel end. The next call raises an error that names the site and the peer, and runs
    nothing."""
    launch = _launch(SharedWorkspace.of(3, 20_000, 32), 0, patience_ns=20_000)
    x, p = torch.zeros(4, 32).bfloat16(), SmallParameters(two_shot, 16, 4)

    def call() -> object:
        return (
            small_message.all_reduce_norm(x, x, x[0], EPS, launch, p)
            if norm
            else small_message.all_reduce(x, launch, p)
        )

    call()
    with pytest.raises(
        TransferError,
        match="site_7 of group 'tp' timed out waiting for partial sums from rank 1: expected call 1, saw call 0",
    ):
        call()
    assert launch.slot.calls.tolist() == [1]


def test_a_call_that_the_kernel_cannot_run_is_refused() -> None:
    launch = _launch(SharedWorkspace.of(2, 4096, 8), 0)
    x, p = torch.zeros(4, 64).half(), SmallParameters(False, 32, 4)
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        small_message.all_reduce(x.float(), launch, p)
    with pytest.raises(UnsupportedError, match="rows have 12 elements"):
        small_message.all_reduce(torch.zeros(4, 12).half(), launch, p)
    with pytest.raises(UnsupportedError, match="too many for a small message"):
        small_message.all_reduce(torch.zeros(2**20, 8).half(), launch, p)
    with pytest.raises(UnsupportedError, match="empty, or not contiguous"):
        small_message.all_reduce(torch.zeros(64, 8).half().t()[:, ::8].t(), launch, p)
    with pytest.raises(UnsupportedError, match="its slot has 4096 and 8 with protocol halves"):
        small_message.all_reduce(torch.zeros(16, 64).half(), launch, p)
    with pytest.raises(UnsupportedError, match="its slot has 4096 and 8 with protocol credits"):
        small_message.all_reduce(x, replace(launch, slot=replace(launch.slot, protocol="credits")), p)
    with pytest.raises(UnsupportedError, match="use wider segments"):
        small_message.all_reduce(torch.zeros(1, 4096).half(), launch, replace(p, segment=16))
    with pytest.raises(UnsupportedError, match="weight of the norm is torch.float32"):
        small_message.all_reduce_norm(x, x, x[0].float(), EPS, launch, p)
    launch.faults.abort()
    with pytest.raises(TransferError, match="was aborted"):
        small_message.all_reduce(x, launch, p)

# SPDX-License-Identifier: Apache-2.0
"""A peer is late, skips a call or is killed. The other rank must wait, or raise an error that names site, group and
peer. The watchdog must end a rank that only replays kernels. Ranks are processes that share memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.runtime import watchdog
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared
from tests.support.shared_memory import SMALL_TILES

PARAMETERS = FusedParameters(1, pieces=1, pushers=1, **SMALL_TILES)
IMPATIENT_NS = 300_000
PATTERNS = {
    "all_gather_matmul": ("rows", 16),
    "matmul_reduce_scatter": ("partial sums", 32),
    "matmul_all_reduce": ("partial sums", 32),
}
"""``(what a call waits for, rows of the left operand)`` for each pattern."""


def _call(pattern: str, launch: Launch) -> torch.Tensor:
    """One call whose operands contain only ones. Each element of the result is 16 in a gather, else 32."""
    return getattr(fused, pattern)(
        torch.ones(PATTERNS[pattern][1], 16).half(), torch.ones(16, 16).half().t(), launch, PARAMETERS
    )


def _first_call(pattern: str, launch: Launch) -> None:
    assert _call(pattern, launch).unique().tolist() == [16 if pattern == "all_gather_matmul" else 32]


def _run(rank: Callable[..., None], *arguments: object, ends: tuple[int, int] = (0, 0)) -> None:
    run_ranks(2, rank, SharedWorkspace.of(2, 20_000, 2), *arguments, seconds=60, ends=ends)


def _loses_its_peer(pattern: str, launch: Launch) -> None:
    """If the peer makes no call, this rank's call still ends. This rank's next call raises."""
    impatient = replace(launch, patience_ns=IMPATIENT_NS, prepared={})
    _call(pattern, impatient)
    with pytest.raises(
        TransferError,
        match=(
            f"site_7 of group 'tp' timed out waiting for {PATTERNS[pattern][0]} from rank 1: expected call 2, saw"
            " call 1"
        ),
    ):
        _call(pattern, impatient)


def _peer_skips(rank: int, workspace: SharedWorkspace, pattern: str, finished: torch.Tensor) -> None:
    launch = workspace.launch(rank)
    _first_call(pattern, launch)
    if rank == 0:
        _loses_its_peer(pattern, launch)
        finished[0] = 1
        return
    while not int(finished[0]):
        time.sleep(0.01)
    # Rank 1 made no second call before rank 0 gave up. So the second call of rank 1 raises.
    missed = f"site site_7 of group 'tp' timed out waiting for {PATTERNS[pattern][0]} from rank 1"
    with pytest.raises(TransferError, match=f"rank 0 gave up first: {missed}: expected call 2, saw call 1"):
        _call(pattern, launch)
    assert launch.slot.calls.tolist() == [1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_peer_that_skips_a_call_is_named(pattern: str) -> None:
    _run(_peer_skips, pattern, shared(1))


def _peer_dies(rank: int, workspace: SharedWorkspace, pattern: str) -> None:
    launch = workspace.launch(rank)
    _first_call(pattern, launch)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _loses_its_peer(pattern, launch)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_peer_that_was_killed(pattern: str) -> None:
    _run(_peer_dies, pattern, ends=(0, -signal.SIGKILL))


def _peer_is_late(rank: int, workspace: SharedWorkspace, pattern: str) -> None:
    launch = workspace.launch(rank)
    _first_call(pattern, launch)
    start = time.monotonic()
    if rank == 1:
        time.sleep(1)
    _first_call(pattern, launch)
    launch.faults.check()
    assert time.monotonic() - start > 0.9


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_peer_that_is_late_within_the_patience(pattern: str) -> None:
    _run(_peer_is_late, pattern)


def _replays_without_its_peer(rank: int, workspace: SharedWorkspace) -> None:
    launch = workspace.launch(rank)
    _first_call("matmul_reduce_scatter", launch)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    watchdog.GRACE_SECONDS = 0.3
    watchdog.watch(launch.faults, lambda: True)
    # As in a CUDA graph, the kernel runs repeatedly without the host's check.
    launch.faults.check = lambda: None  # type: ignore[method-assign]
    while True:
        _call("matmul_reduce_scatter", replace(launch, patience_ns=IMPATIENT_NS, prepared={}))


def test_replays_without_a_peer_end(capfd: pytest.CaptureFixture[str]) -> None:
    _run(_replays_without_its_peer, ends=(-signal.SIGABRT, -signal.SIGKILL))
    said = capfd.readouterr().err
    assert (
        "site site_7 of group 'tp' timed out waiting for partial sums from rank 1" in said
        and "The process ends now" in said
    )
    assert "_replays_without_its_peer" in said, "the stack of the program is not printed"

# SPDX-License-Identifier: Apache-2.0
"""One of three ranks gives up, or its host aborts the group, in every schedule whose kernels wait for peers.

After the fault:

- each returned number is right or NaN;
- each rank gets an error. On the other ranks, the error names the rank that gave up or aborted;
- if a rank gave up, all errors say what that rank waited for;
- in its next call, the rank that gave up stores nothing at its peers;
- from that call on, it sets no flag for which a peer waits.

This holds even if the host does not check for errors between calls, as in replays of a CUDA graph. Copy engines still
store, but set each flag to a number for which no rank waits.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.every_schedule import EVERY
from tests.kernels.every_schedule import SIGNALS
from tests.kernels.every_schedule import workspace
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

WORLD = 3
IMPATIENT_NS, PATIENT_NS = 100_000, 10**15
"""Two patiences in nanoseconds. In the interpreter, a wait does not measure time. It counts polls, and each poll counts
as 1000 ns. So ``IMPATIENT_NS`` is 100 polls.
``PATIENT_NS`` outlasts any test."""
SECONDS = 60.0
IN_VAIN = r"site site_7 of group 'tp' timed out waiting for [a-z -]+ rank 2: expected call 2, saw call 1"
FIRST = "rank 0 gave up first: "


def _meet(steps: torch.Tensor, rank: int, step: int) -> None:
    """Wait until every rank has reached ``step``."""
    steps[rank] = step
    _await(steps, step)


def _await(steps: torch.Tensor, step: int) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while int(steps.min()) < step:
        assert time.monotonic() < deadline, f"ranks got no further than steps {steps.tolist()}"
        time.sleep(0.005)


def _as_a_graph(launch: Launch, patience_ns: int) -> Launch:
    """Turn off the host's check, which would raise an error. The kernels then run again after a fault, as in a CUDA
    graph."""
    launch.faults.check = lambda: None  # type: ignore[method-assign]
    return replace(launch, patience_ns=patience_ns, prepared={})


def _flags_from(space: SharedWorkspace, source: int) -> torch.Tensor:
    """The flags that ``source`` sets: in the memory of each rank, one credit and ``SIGNALS`` signals."""
    flags = space.flags.view(WORLD, -1, FLAG_WORDS)[:, :, 0]
    first = WORLD + source * SIGNALS
    return torch.cat([flags[:, source : source + 1], flags[:, first : first + SIGNALS]], 1)


def _right_or_told(name: str, launch: Launch, call: int) -> None:
    found = EVERY[name].run(launch, call)
    told = launch.faults.error()
    what = f"rank {launch.rank} returned {found.unique().tolist()[:4]} for call {call}"
    assert told is not None or EVERY[name].is_right(found, call, WORLD), what
    right = EVERY[name].right(call, WORLD)
    assert (found.isnan() | (found == right)).all(), f"{what}, expected {right} or NaN"


def _last_is_late(rank: int, space: SharedWorkspace, name: str, steps: torch.Tensor) -> None:
    """Rank 2 makes its second call only after rank 0's wait has timed out. Rank 1's patience never ends."""
    launch = space.launch(rank)
    assert EVERY[name].is_right(EVERY[name].run(launch, 1), 1, WORLD)
    _meet(steps, rank, 1)
    launch = _as_a_graph(launch, IMPATIENT_NS if rank == 0 else PATIENT_NS)
    if rank == 2:
        _await(steps[:1], 2)
    _right_or_told(name, launch, 2)
    if rank == 0:
        assert "timed out waiting" in str(launch.faults.error())
        signalled = _flags_from(space, 0)
    else:
        assert launch.faults.error() is not None, "this rank has no error, although rank 0 gave up in this call"
    _meet(steps, rank, 2)
    if rank == 0:
        # Peers make no call until rank 0 reaches step 3.
        stored = space.data[1:].clone()
        _right_or_told(name, launch, 3)
        # A copy engine does not check whether this rank has given up, so it still stores (``transports.copy_engine``).
        assert "cop" in name or torch.equal(space.data[1:], stored), "a rank that has given up stored to a peer"
    _meet(steps, rank, 3)
    for call in (4, 5):
        _right_or_told(name, launch, call)
    _meet(steps, rank, 4)
    if rank == 0:
        now = _flags_from(space, 0)[1:]
        # Copy engines go on, but they set the flags to a negative number, for which no rank waits.
        assert (now[now != signalled[1:]] < 0).all(), "a rank that has given up signalled a peer"
    del launch.faults.check
    with pytest.raises(TransferError, match=IN_VAIN if rank == 0 else FIRST + IN_VAIN):
        EVERY[name].run(launch, 6)


@pytest.mark.parametrize("name", EVERY)
def test_no_rank_returns_a_wrong_result_after_a_peer_gave_up(name: str) -> None:
    run_ranks(WORLD, _last_is_late, workspace(WORLD), name, shared(WORLD), seconds=SECONDS)


def _host_aborts(rank: int, space: SharedWorkspace, name: str, steps: torch.Tensor) -> None:
    """Rank 2's host aborts the group while the kernels of the other ranks wait for rank 2's call."""
    launch = space.launch(rank, PATIENT_NS)
    assert EVERY[name].is_right(EVERY[name].run(launch, 1), 1, WORLD)
    _meet(steps, rank, 1)
    if rank == 2:
        time.sleep(0.3)
        launch.faults.abort()
    else:
        EVERY[name].run(launch, 2)
    calls = launch.slot.calls.clone()
    with pytest.raises(TransferError, match=f"group 'tp' was aborted{'' if rank == 2 else ' by rank 2'}; its"):
        EVERY[name].run(launch, 3)
    assert torch.equal(launch.slot.calls, calls), "a call ran after the abort"


@pytest.mark.parametrize("name", EVERY)
def test_a_host_that_aborts_its_group_ends_the_waits_of_all_ranks(name: str) -> None:
    run_ranks(WORLD, _host_aborts, workspace(WORLD), name, shared(WORLD), seconds=SECONDS)

# SPDX-License-Identifier: Apache-2.0
"""Calls are counted modulo 2**32. Schedules must go on when the count wraps around. A flag that was last set more
than 2**31 calls ago must count as not set."""

from __future__ import annotations

import time

import pytest

from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.every_schedule import EVERY
from tests.kernels.every_schedule import workspace
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks

WORLD = 2


def _at(call: int) -> int:
    """``call`` modulo 2**32, as int32."""
    return (call + 2**31) % 2**32 - 2**31


def _count_from(launch: Launch, space: SharedWorkspace, calls: int, touched: int) -> None:
    """Set ``launch``'s counter and all ranks' flags as if ``calls`` calls had ended. The flags that are credits get
    the number of the last call. The other flags, the signals, get the number ``touched``."""
    launch.slot.calls.fill_(_at(calls))
    flags = space.flags.view(WORLD, -1, FLAG_WORDS)[:, :, 0]
    flags[:, :WORLD] = _at(calls)
    flags[:, WORLD:] = _at(touched)


def _wraps(rank: int, space: SharedWorkspace, name: str, calls: int) -> None:
    launch = space.launch(rank)
    launch.slot.calls.fill_(_at(calls))
    for call in (1, 2, 3, 4):
        found = EVERY[name].run(launch, call)
        launch.faults.check()
        assert EVERY[name].is_right(found, call, WORLD), (call, found.unique())


PAST_0 = ("fused all_gather_matmul", "chunked matmul_all_reduce, pushed", "small_message, two-shot with norm")
"""``make test`` takes the count past 2**32 only for these names, because all schedules compare flags by the same
functions."""


@pytest.mark.parametrize(
    ("name", "calls"),
    [pytest.param(name, 2**31 - 2, id=f"{name}, past 2**31") for name in EVERY]
    + [
        pytest.param(name, 2**32 - 2, id=f"{name}, past 2**32", marks=[pytest.mark.thorough] * (name not in PAST_0))
        for name in EVERY
    ],
)
def test_the_count_of_calls_wraps_around(name: str, calls: int) -> None:
    space = workspace(WORLD)
    _count_from(space.launch(0), space, calls, calls)
    run_ranks(WORLD, _wraps, space, name, calls, seconds=60)


def _late(rank: int, space: SharedWorkspace, name: str, calls: int) -> None:
    launch = space.launch(rank)
    launch.slot.calls.fill_(_at(calls))
    for call in (1, 2):
        if rank == 1:
            time.sleep(0.3)
        found = EVERY[name].run(launch, call)
        launch.faults.check()
        assert EVERY[name].is_right(found, call, WORLD), f"rank {rank} did not wait: {found.unique().tolist()}"


@pytest.mark.parametrize("name", EVERY)
def test_a_signal_of_2_to_31_calls_ago_ends_no_wait(name: str) -> None:
    space, calls = workspace(WORLD), 5
    _count_from(space.launch(0), space, calls, calls - 2**31 - 3)
    run_ranks(WORLD, _late, space, name, calls, seconds=60)

# SPDX-License-Identifier: Apache-2.0
"""Signals between processes that share memory. Kernels run in Triton's interpreter. For the interpreter,
``kernels.signals`` replaces some functions by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from overlap_inductor.kernels.layout import BOARD_HEAD
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import STOP_WORDS
from overlap_inductor.kernels.layout import WINDOW
from overlap_inductor.kernels.signals import add_flag
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import has_come
from overlap_inductor.kernels.signals import reached
from overlap_inductor.kernels.signals import set_flag
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.transfer import NOBODY
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

WORDS = 256


@triton.jit
def pass_on(data, peer_data, flags, peer_flags, stop, wrong, rounds, base, N: tl.constexpr, WRITES: tl.constexpr):
    """In each round, the writer fills its peer's words with the round's number, and signals. The reader counts the
    words that hold another number, and acknowledges."""
    offsets = tl.arange(0, N)
    bad = tl.full((), 0, tl.int32)
    for i in range(1, rounds + 1):
        if WRITES:
            tl.store(peer_data + offsets, tl.full((N,), 0, tl.int32) + i)
            add_flag(peer_flags, 1)
            wait_at_least(flags + 32, base + i, stop, 1_000_000_000, 1, 0)
        else:
            wait_at_least(flags, base + i, stop, 1_000_000_000, 2, 0)
            bad += tl.sum((tl.load(data + offsets) != i).to(tl.int32))
            set_flag(peer_flags + 32, base + i)
    tl.store(wrong, bad)


def _one(rank: int, data: torch.Tensor, flags: torch.Tensor, wrong: torch.Tensor, base: int) -> None:
    other = 1 - rank
    stop = torch.zeros(STOP_WORDS, dtype=torch.int32)
    pass_on[(1,)](data[rank], data[other], flags[rank], flags[other], stop, wrong[rank:], 50, base, WORDS, rank == 0)


def _two_ranks(base: int) -> torch.Tensor:
    data, wrong = shared(2, WORDS), shared(2, fill=-1)
    run_ranks(2, _one, data, shared(2, 2 * FLAG_WORDS, fill=base), wrong, base)
    return wrong


def test_data_is_there_when_its_signal_is() -> None:
    assert _two_ranks(0).tolist() == [0, 0]


def test_flags_may_wrap_around() -> None:
    """A counter may pass 2**31: a wait looks only at the difference between counter and target."""
    assert _two_ranks(2**31 - 20).tolist() == [0, 0]


@triton.jit
def compare(seen, target, found):
    i = tl.program_id(0)
    tl.store(found + i, reached(tl.load(seen + i), tl.load(target + i)).to(tl.int32))
    tl.store(found + 8 + i, has_come(seen + i, tl.load(target + i)).to(tl.int32))


def _signed(numbers: list[int]) -> torch.Tensor:
    """``numbers`` modulo 2**32, as int32."""
    return torch.tensor([(n + 2**31) % 2**32 - 2**31 for n in numbers], dtype=torch.int32)


@pytest.mark.parametrize("call", [0, 1, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1])
def test_a_flag_is_reached_if_it_equals_the_target_or_is_a_little_ahead(call: int) -> None:
    """The comparison must be right at any count of calls. A flag last set 2**31 calls ago has not reached the target.
    After an abort, a copy engine sends ``NOBODY`` plus the call's number, which must not reach the target."""
    ahead = [0, 1, WINDOW - 1, -1, -(2**31), -(2**31) - 5, NOBODY.value, WINDOW]
    found = torch.zeros(16, dtype=torch.int32)
    compare[(8,)](_signed([call + n for n in ahead]), _signed([call] * 8), found)
    assert found.tolist() == [1, 1, 1, 0, 0, 0, 0, 0] * 2


TRIES = 40


@triton.jit
def give_up_alike(flag, stop, who):
    """Wait for a flag that is never set, until the wait times out. The kernel then writes a fault record, in which the
    code, the peer and the expected value are all ``who``."""
    wait_at_least(flag, who, stop, 3_000, who, who)


def _one_of_two(block: int, space: SharedWorkspace, steps: torch.Tensor) -> None:
    """One of two blocks of rank 0 that give up at the same time. Block 0 then checks the rank's fault record on the
    board, which is memory for the fault records of all ranks."""
    for attempt in range(TRIES):
        steps[block] = 3 * attempt + 1
        while int(steps.min()) < 3 * attempt + 1:
            pass
        flag = torch.tensor([-7 - block], dtype=torch.int32)
        give_up_alike[(1,)](flag, space.stop[0], 8 + block)
        steps[block] = 3 * attempt + 2
        while int(steps.min()) < 3 * attempt + 2:
            pass
        if block == 0:
            _, code, peer, wanted, seen, *_ = space.board[BOARD_HEAD:].tolist()
            found = code, peer, wanted, seen
            assert found in ((8, 8, 8, -7), (9, 9, 9, -8)), (
                f"code, peer, values wanted and seen are of two records: {found}"
            )
            assert space.board[0] == 1 and space.stop[:, 0].tolist() == [1, 1, 1], (
                "the board or an abort word is not set"
            )
            space.stop[:, 0] = 0
            space.board[BOARD_HEAD : BOARD_HEAD + 5] = 0
        steps[block] = 3 * attempt + 3
        while int(steps.min()) < 3 * attempt + 3:
            pass


def test_two_blocks_that_give_up_together_leave_one_whole_record() -> None:
    space = SharedWorkspace.of(3, 16, 1)
    # ``faults`` holds tensors whose addresses the kernels read. It is made before the fork, so both processes have
    # these tensors at the same addresses.
    faults = space.faults(0)
    run_ranks(2, _one_of_two, space, shared(2), seconds=60)
    del faults


@triton.jit
def wait_once(flag, target, stop, came):
    wait_at_least(flag, target, stop, 1_000_000_000, 1, 0)
    tl.store(came, 1)


def test_a_wait_returns_at_once_if_the_group_was_aborted() -> None:
    state: dict[str, Any] = {name: torch.zeros(STOP_WORDS, dtype=torch.int32) for name in ("flag", "stop", "came")}
    state["stop"][0] = 1
    wait_once[(1,)](state["flag"], 5, state["stop"], state["came"])
    assert state["came"][0] == 1


@triton.jit
def number_flags(flags, signals, WORLD: tl.constexpr):
    """Add one to each flag of a slot, which is the part of the workspace that a call uses."""
    for peer in range(WORLD):
        add_flag(credit_flag(flags, peer), 1)
        for index in range(signals):
            add_flag(signal_flag(flags, peer, index, signals, WORLD), 1)


def test_flags_of_a_slot_do_not_overlap() -> None:
    flags = torch.zeros(4 * (1 + 3) * FLAG_WORDS, dtype=torch.int32)
    number_flags[(1,)](flags, 3, 4)
    assert flags.view(-1, FLAG_WORDS)[:, 0].tolist() == [1] * 16 and int(flags.sum()) == 16

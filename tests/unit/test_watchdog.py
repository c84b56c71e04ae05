# SPDX-License-Identifier: Apache-2.0
"""The watchdog sees when a kernel has given up its wait for a peer (a *fault*). It then logs the error, and stops the
group's other waits on this rank's GPU. A program that is not told of the error is ended, or gets exit status 1. The
watchdog never ends a healthy process."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.kernels.layout import WAIT_KINDS
from overlap_inductor.kernels.layout import WAIT_PART
from overlap_inductor.runtime import watchdog
from overlap_inductor.runtime import workspace
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.watchdog import Watchdog
from tests.support.fake_group import fake_group


@dataclass
class Scene:
    """A watchdog with one group, and a clock that tests set. ``ends``: the messages with which the watchdog would have
    ended the process."""

    now: float = 0.0
    alive: bool = True
    ends: list[str] = field(default_factory=list)
    in_flight: bool = False

    def __post_init__(self) -> None:
        self.faults = FaultRecord.of("tp", [4, 5, 6], torch.device("cpu"))
        self.site = self.faults.number("mlp/up")
        self.dog = Watchdog(self.ends.append, lambda: self.now)
        self.dog.watch(self.faults, lambda: self.alive, lambda: self.in_flight)

    def give_up(self, rank: int = 0, stamp: int = 0) -> None:
        """Write the record of a kernel that gave up. The kernel ran on the group's rank ``rank`` and waited for call 8
        of the group's second rank."""
        record = self.faults.board.record(rank)
        record[1:5] = torch.tensor([WAIT_KINDS * self.site + WAIT_PART, 1, 8, 7])
        record[6:] = torch.tensor([stamp]).view(torch.int32)
        record[0] = 1
        self.faults.board.words[0] = 1

    def look(self, *moments: float) -> None:
        for moment in moments:
            self.now = moment
            self.dog.look()


def test_a_healthy_process_is_never_ended() -> None:
    scene = Scene()
    scene.look(0, 1e3, 1e6, 1e9)
    assert scene.ends == [] and scene.dog.close() == []


def test_a_fault_is_logged_once_and_ends_the_process_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.look(0, 100)
    scene.give_up()
    with caplog.at_level(logging.ERROR, "overlap_inductor"):
        scene.look(100.1, 100.2, 160)
    assert scene.ends == [], "the grace period begins when the fault is seen"
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert (
        "site mlp/up of group 'tp' timed out waiting for rows from rank 5: expected call 8, saw call 7" in caplog.text
    )
    scene.look(160.2)
    assert (
        len(scene.ends) == 1 and "rank 5" in scene.ends[0] and "Within 60 s no call raised this error" in scene.ends[0]
    )


def test_the_rank_that_gave_up_first_is_named_and_waits_here_are_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """When another rank gives up, it sets the abort word of this rank's GPU, which ends the waits there. If that rank
    cannot set the word, the waits go on. So this rank's watchdog sets it."""
    scene = Scene()
    scene.give_up(0, stamp=7)
    scene.give_up(2, stamp=6)
    assert not scene.faults.stop[0]
    with caplog.at_level(logging.ERROR, "overlap_inductor"):
        scene.look(0)
    assert "rank 6 gave up first: site mlp/up of group 'tp' timed out waiting for rows from rank 5" in caplog.text
    assert scene.faults.stop[0] == 1
    with pytest.raises(TransferError, match="rank 6 gave up first"):
        scene.faults.check()


def test_a_call_whose_number_is_past_2_to_31_is_named() -> None:
    scene = Scene()
    scene.give_up()
    scene.faults.board.record(0)[3:5] = torch.tensor([-(2**31), 2**31 - 1])
    with pytest.raises(TransferError, match="expected call 2147483648, saw call 2147483647"):
        scene.faults.check()


def test_a_site_has_one_number_on_all_ranks() -> None:
    """A site's number must not depend on the order in which a rank meets the sites."""
    ours, theirs = Scene().faults, FaultRecord.of("tp", [4, 5, 6], torch.device("cpu"))
    assert theirs.number("other") != theirs.number("mlp/up") == ours.number("mlp/up") < 2**28


def test_a_program_that_got_the_error_is_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.give_up()
    scene.look(0)
    with pytest.raises(TransferError, match="rank 5"):
        scene.faults.check()
    scene.look(1, 59, 61, 1e9)
    assert scene.ends == [] and scene.dog.close() == []


def test_a_program_that_destroys_the_group_is_not_ended_but_ends_with_the_error() -> None:
    scene = Scene()
    scene.give_up()
    scene.look(0, 59)
    scene.alive = False
    scene.look(61, 1e9)
    assert scene.ends == []
    assert "rank 5" in scene.dog.close()[0], "the program may have used an incomplete result"


def test_a_fault_just_before_its_group_was_destroyed_is_seen() -> None:
    scene = Scene()
    scene.give_up()
    scene.alive = False
    scene.look(0, 1e9)
    assert scene.ends == [] and len(scene.dog.close()) == 1


def test_a_program_that_aborts_its_group_is_not_ended() -> None:
    scene = Scene()
    scene.faults.abort()
    scene.look(0, 1e9)
    assert scene.ends == [] and scene.dog.close() == []
    with pytest.raises(TransferError, match="group 'tp' was aborted"):
        scene.faults.check()


def test_destroyed_groups_are_forgotten() -> None:
    scene = Scene()
    scene.look(0)
    scene.alive = False
    scene.look(1)
    scene.give_up()
    scene.look(2, 1e9)
    assert scene.ends == [] and scene.dog.close() == []


def test_a_fault_after_the_groups_destruction_is_reported_at_the_programs_end(caplog: pytest.LogCaptureFixture) -> None:
    """When the group is destroyed, its last calls are in flight. The program may still read their results."""
    scene = Scene(in_flight=True)
    scene.look(0)
    scene.alive = False
    scene.look(1, 2)
    scene.give_up()
    scene.look(3)
    scene.in_flight = False
    scene.look(4, 1e9)
    assert (
        scene.ends == [] and "so no call can raise this error. The program will end with exit status 1" in caplog.text
    )
    assert "rank 5" in scene.dog.close()[0]


def test_a_fault_of_the_call_that_has_just_ended_is_seen() -> None:
    scene = Scene(in_flight=True)
    scene.alive = False

    def ends() -> bool:
        scene.give_up()
        return False

    scene.dog._watches[0].in_flight = ends
    scene.look(0)
    assert len(scene.dog.close()) == 1


def test_a_peers_fault_after_this_ranks_calls_have_ended_is_ignored() -> None:
    scene = Scene(in_flight=True)
    scene.alive = False
    scene.look(0)
    scene.in_flight = False
    scene.look(1)
    scene.give_up(1)
    scene.look(2)
    assert scene.dog.close() == []


def test_if_cuda_has_failed_the_programs_end_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "EXIT_SECONDS", 0.05)
    scene = Scene()

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    scene.dog._watches[0].in_flight = fail
    scene.alive = False
    scene.look(0)
    assert "CUDA has failed" in scene.dog.close()[0]


def test_a_grace_period_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", math.inf)
    scene = Scene()
    scene.give_up()
    scene.look(0, 1e9)
    assert scene.ends == [] and len(scene.dog.close()) == 1


def test_groups_on_gpus_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[Any, Callable[[], bool], Callable[[], bool]]] = []
    monkeypatch.setattr(watchdog, "watch", lambda *arguments: watched.append(arguments))
    scene = Scene()
    monkeypatch.setattr(FaultRecord, "of", lambda *arguments: scene.faults)
    monkeypatch.setattr(workspace.symmetric, "multiprocessors", lambda device: 1)
    with fake_group(2) as group:
        place = workspace.workspace_of(group, torch.device("cuda", 0))
        assert workspace.workspace_of(group, torch.device("cuda", 0)) is place
        [(faults, alive, in_flight)] = watched
        assert faults is place.faults and alive() and not in_flight()
    assert not alive()


# Whole processes

PROGRAM = """
import sys, time
from overlap_inductor.runtime import watchdog
watchdog.POLL_SECONDS, watchdog.GRACE_SECONDS = 0.01, {grace}
class Faults:
    told = {told}
    def error(self):
        return "site a timed out waiting for rank 1."
    def stop_waits(self):
        pass
alive, in_flight = [True], [False]
{before}
watchdog.watch(Faults(), lambda: alive[0], lambda: in_flight[0])
{rest}
"""


def _run(rest: str, before: str = "", told: bool = False, grace: float = 60.0) -> tuple[int, str]:
    """``(exit status, text)`` of ``PROGRAM``. There is a fault from the start, unless ``before`` replaces
    ``Faults.error``. The text is standard output, then standard error."""
    program = PROGRAM.format(rest=rest, before=before, told=told, grace=grace)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_program_that_is_stuck_is_ended_as_by_nccl() -> None:
    status, said = _run("time.sleep(50)", grace=0.2)
    assert status == -signal.SIGABRT
    assert "site a timed out waiting for rank 1. Within 0.2 s no call raised" in said
    assert 'File "<string>", line 14 in <module>' in said, "the message must show where the program was stuck"


def test_a_program_that_did_not_get_the_error_ends_with_it() -> None:
    status, said = _run("print('result', end=''); alive[0] = False; time.sleep(0.1)")
    assert status == 1 and "result" in said and "rank 1. No call has raised this error" in said


def test_a_program_that_got_the_error_keeps_its_exit_status() -> None:
    assert _run("sys.exit(3)", told=True)[0] == 3


def test_a_program_without_a_fault_ends_normally() -> None:
    status, said = _run("time.sleep(0.3)", before="Faults.error = lambda self: None", grace=0.1)
    assert (status, said) == (0, "")


PENDING = """
watchdog.EXIT_SECONDS = 1.0
given_up = []
Faults.error = lambda self: "site a timed out waiting for rank 1." if given_up else None
import threading
in_flight[0] = True
ends = lambda: in_flight.__setitem__(0, False)
def later(do):
    timer = threading.Timer(0.3, do)
    timer.daemon = True
    timer.start()
"""


def test_a_fault_that_comes_at_the_programs_end_is_reported() -> None:
    """The program destroys the group while a kernel still runs. At the program's end, the kernel times out."""
    status, said = _run("alive[0] = False; time.sleep(0.1); later(lambda: (given_up.append(1), ends()))", PENDING)
    assert status == 1 and "rank 1. No call has raised this error" in said


def test_calls_in_flight_may_end_normally_at_the_programs_end() -> None:
    status, said = _run("alive[0] = False; later(ends)", PENDING)
    assert (status, said) == (0, "")


@pytest.mark.parametrize("alive", [True, False])
def test_a_program_ends_with_an_error_while_its_calls_wait_for_peers(alive: bool) -> None:
    status, said = _run(f"alive[0] = {alive}; time.sleep(0.1)", PENDING)
    assert status == 1 and "calls were still in flight 1 s after the program came to its end" in said


def _child(found: Any) -> None:
    found.put((watchdog._WATCHDOG.close(), [t.name for t in threading.enumerate()]))


def test_a_forked_child_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_WATCHDOG", Watchdog())
    scene = Scene()
    watchdog.watch(scene.faults, lambda: True)
    scene.faults.abort()
    scene.faults.told = False
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=_child, args=(found,))
    child.start()
    assert found.get() == ([], ["MainThread"])
    child.join(10)
    assert child.exitcode == 0 and os.getpid() != child.pid
    assert len(watchdog._WATCHDOG.close()) == 1

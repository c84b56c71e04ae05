# SPDX-License-Identifier: Apache-2.0
"""If the thread that calls graphs waits inside a collective, the rank makes a report. In a graph's call, the rank
reports the call's number. Outside of graphs, the rank reports how many of the group's collectives it has issued (the
*place*, ``call_place``)."""

from __future__ import annotations

import datetime
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.runtime import call_report
from overlap_inductor.runtime.call_state import GroupState
from overlap_inductor.torch_compat.blocked_threads import in_collective
from tests.support.fake_group import fake_group


def _looks(state: call_report.Watched, number: int) -> None:
    before: call_report.Seen = (None, None)
    for _ in range(number):
        before = call_report.report(state, before)


def test_a_place_is_reported_once_and_only_while_the_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, counted, store = [True], [0], dist.HashStore()
    monkeypatch.setattr(call_report, "group_store", lambda group: store)
    monkeypatch.setattr("overlap_inductor.runtime.call_state.in_collective", lambda thread: waits[0])
    with fake_group(2) as group:
        state = GroupState(group, 0)
        state._count = lambda: counted[0]
        _looks(state, 3)
        assert call_report.place_of(state, 0) == -1, "the rank has issued nothing"
        counted[0] += 2
        _looks(state, 1)
        assert call_report.place_of(state, 0) == -1, "the rank may have begun to wait just now"
        _looks(state, 2)
        assert call_report.place_of(state, 0) == state.promised == 2
        state.count(3)
        _looks(state, 2)
        assert (call_report.place_of(state, 0), call_report.call_of(state, 0)) == (2, 1), "the rank is inside its call"
        counted[0] += 3
        state.returned()
        counted[0] += 1
        waits[0] = False
        _looks(state, 2)
        assert call_report.place_of(state, 0) == 2, "the rank computes"
        assert call_report.call_of(state, 0) == -1, "the rank has left its call"
        waits[0] = True
        _looks(state, 2)
        assert call_report.place_of(state, 0) == 2 + 3 + 1


def test_the_locals_of_a_thread_need_no_collection_after_a_look() -> None:
    """A look takes the frames of all threads. It must leave no cycle that holds them."""
    made, looked = threading.Event(), threading.Event()
    alive: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        x = torch.ones(1)
        alive.append(weakref.ref(x))
        made.set()
        looked.wait(30)

    thread = threading.Thread(target=work)
    gc.collect()
    gc.disable()
    try:
        thread.start()
        assert made.wait(30) and thread.ident is not None
        assert not in_collective(thread.ident)
        looked.set()
        thread.join()
        assert alive[0]() is None
    finally:
        gc.enable()


def test_a_look_at_a_thread_keeps_none_of_its_tensors() -> None:
    """Up to Python 3.12, a look at a frame's locals would keep them until the frame's function returns."""
    made, looked, freed, ends = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    alive: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        x = torch.ones(1)
        alive.append(weakref.ref(x))
        made.set()
        looked.wait(30)
        del x
        freed.set()
        ends.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert made.wait(30) and thread.ident is not None
    assert not in_collective(thread.ident)
    looked.set()
    assert freed.wait(30)
    found = alive[0]()
    ends.set()
    thread.join()
    assert found is None


LOOKS = """
import gc, random, sys, threading, time
from overlap_inductor.torch_compat.blocked_threads import in_collective

def function(number):
    lists = "".join(f"  x{i} = []\\n" for i in range(random.randrange(120)))
    exec(f"def call{number}(depth):\\n{lists}  return random.choice(calls)(depth - 1) if depth else []", globals())
    return globals()[f"call{number}"]

def work():
    while not ended:
        random.choice(calls)(20)

def let_others_run(phase, info):
    if threading.current_thread() is threading.main_thread():
        time.sleep(0.001)

calls, ended = [function(i) for i in range(30)], False
thread = threading.Thread(target=work, daemon=True)
thread.start()
gc.set_threshold(7)
sys.setswitchinterval(1e-4)
gc.callbacks.append(let_others_run)
try:
    ends = time.monotonic() + 20
    for _ in range(1000):
        if time.monotonic() > ends:
            break
        assert not in_collective(thread.ident)
        time.sleep(0)
finally:
    ended = True
"""


def test_a_collection_lets_the_thread_go_on() -> None:
    """The look must not read frames that have returned meanwhile. Such a read raises an error or ends the process."""
    run = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, (run.returncode, run.stderr)


@pytest.mark.parametrize(("namespace", "wanted"), [("c10d_of_this_test", True), ("other_of_this_test", False)])
def test_a_thread_inside_an_op(namespace: str, wanted: bool) -> None:
    held, begun = threading.Lock(), threading.Event()
    library = torch.library.Library(namespace, "DEF")

    def wait(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        with held:
            return x + 1

    library.define("wait(Tensor x) -> Tensor")
    library.impl("wait", wait, "CPU")
    thread = threading.Thread(target=lambda: getattr(torch.ops, namespace).wait(torch.ones(1)))
    with held:
        thread.start()
        assert begun.wait(30) and thread.ident is not None
        deadline = time.monotonic() + 10
        while wanted and not in_collective(thread.ident) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert in_collective(thread.ident) is wanted
    thread.join()
    assert not in_collective(thread.ident)


class _State:
    """A group's counts that change never. ``looked``: number of looks."""

    prefix, promised, told_inside = "state", -1, -1

    def __init__(self, group: Any = None) -> None:
        self.group, self.lock, self.looked = group, threading.Lock(), 0

    def reached(self) -> int | None:
        self.looked += 1
        return None

    def inside(self) -> tuple[int, int] | None:
        return None


def _is_looked_at(state: _State) -> bool:
    before, deadline = state.looked, time.monotonic() + 10
    while state.looked == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return state.looked > before


def test_looks_become_rare_when_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to the next look is a share of the time since the last report, between ``AGAIN`` and ``INTERVAL``."""
    monkeypatch.setattr(call_report, "group_store", lambda group: dist.HashStore())
    state = _State(type("Group", (), {"rank": lambda self: 0})())
    looks, watching = call_report._Looks(weakref.ref(state)), call_report._Watching()
    assert looks.interval(1e9) == call_report.INTERVAL, "nothing was reported yet"
    state.reached = lambda: 3  # type: ignore[method-assign]
    assert watching._looked(looks) and looks.reported is None
    assert watching._looked(looks) and looks.reported is not None
    first = looks.reported
    assert watching._looked(looks) and looks.reported == first, "the same place is no new report"
    waits = [looks.interval(first + seconds) for seconds in (0.0, 1.0, 2.0, 1e3)]
    assert waits == pytest.approx([call_report.AGAIN, 0.05, 0.1, call_report.INTERVAL])
    state.reached = lambda: 4  # type: ignore[method-assign]
    assert watching._looked(looks) and watching._looked(looks) and looks.reported > first


def test_groups_that_end_before_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread goes on with the other groups."""
    monkeypatch.setattr(call_report, "INTERVAL", 0.05)
    watching, first = call_report._Watching(), _State()
    watching.add(first)
    assert _is_looked_at(first)
    watching.add(_State())
    later = _State()
    watching.add(later)
    assert _is_looked_at(later) and _is_looked_at(first) and len(watching._looks) == 2
    watching.end()
    assert watching._thread is not None and not watching._thread.is_alive()


def test_a_forked_child_watches_its_groups() -> None:
    parents = _State()
    call_report.watch(parents)
    assert _is_looked_at(parents)
    child = os.fork()
    if not child:
        code = 1
        try:
            own = _State()
            call_report.watch(own)
            code = 0 if _is_looked_at(own) and len(call_report._WATCHING._looks) == 1 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_ends_no_store_of_the_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file of a ``FileStore`` counts the store's users. The last user that ends deletes the file."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set("key", "here")
    monkeypatch.setattr(call_report, "_OF_PARENT", [])
    state = _State()
    for _ in range(4):
        call_report._STORES[state] = store.clone()
        child = os.fork()
        if not child:
            os._exit(0 if len(call_report._OF_PARENT) == 1 and not call_report._STORES else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "store").exists() and store.get("key") == b"here"


def test_a_report_does_not_wait_for_the_store_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread may wait for a key of the group's store, as NCCL does before its first collective."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=datetime.timedelta(seconds=60))
    reader = store.clone()
    monkeypatch.setattr(call_report, "group_store", lambda group: store)
    state = _State(type("Group", (), {"rank": lambda self: 0})())
    state.reached = lambda: 3  # type: ignore[method-assign]
    waits = threading.Thread(target=store.get, args=["late"])
    waits.start()
    time.sleep(0.3)
    writes = threading.Thread(target=_looks, args=[state, 2], daemon=True)
    writes.start()
    writes.join(20)
    written = not writes.is_alive()
    reader.set("late", "now")
    waits.join()
    assert written and reader.get("state/reached/0") == b"3"


class _PythonStore(dist.Store):
    """A store without ``clone``."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.written = error, dict[str, str]()

    def set(self, key: str, value: str) -> None:
        if self.error is not None:
            raise self.error
        self.written[key] = value


def test_a_store_without_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _PythonStore()
    monkeypatch.setattr(call_report, "group_store", lambda group: store)
    state = _State(type("Group", (), {"rank": lambda self: 0})())
    state.reached = lambda: 3  # type: ignore[method-assign]
    _looks(state, 2)
    assert store.written == {"state/reached/0": "3"}


def test_a_store_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The watching thread goes on with the other groups."""
    monkeypatch.setattr(call_report, "INTERVAL", 0.05)
    store = _PythonStore(TypeError("no connection"))
    monkeypatch.setattr(call_report, "group_store", lambda group: store)
    watching, good, bad = call_report._Watching(), _State(), _State(type("Group", (), {"rank": lambda self: 0})())
    bad.reached = lambda: 3  # type: ignore[method-assign]
    watching.add(bad)
    watching.add(good)
    deadline = time.monotonic() + 10
    while len(watching._looks) == 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _is_looked_at(good) and [looks.state() for looks in watching._looks] == [good]
    watching.end()
    assert "no connection" in caplog.text

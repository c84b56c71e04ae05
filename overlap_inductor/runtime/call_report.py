# SPDX-License-Identifier: Apache-2.0
"""Tells waiting ranks that this rank is inside a collective, which it issued outside of graphs or in a graph's call.

If a rank runs a frame uncompiled while its peers overlap the frame's graph, the ranks wait for each other::

    rank 0   (uncompiled) all_reduce: waits for rank 1
    rank 1   the graph's call: waits for the plan of rank 0

So each process has a watching thread. For each group (``call_state``), the watching thread looks again and again at the
*calling thread*, which made the newest call of a graph with the group's collectives. The watching thread makes a report
if two looks in a row find the calling thread inside one collective:

* If the collective was issued outside of graphs, the report names the *place* that this rank has reached. The place is
  the number of the group's collectives that this rank has issued (``call_place``). The report is a promise: this rank
  joins no call that begins before this place. A rank that waits in such a call runs its plain program. The reporting
  rank skips the call (``call_board.skip``).
* If the collective belongs to a call, the report names the call's number. Another rank may have skipped this call
  because, by its own counts, that rank had run the call's collectives uncompiled. If that rank had run them, this rank
  would no longer be inside one of them. So the report shows that the skip was wrong.

Reports go to the group's store. The watching thread has its own connection to the store, because the calling thread
may block the group's connection while it waits for a key. One lock is held while a report is made, and while a call is
counted. So once a rank has counted a call, it reports nothing from before the call.

When the program ends, the watching thread is stopped, because a thread that returns from C++ at that time would abort
the process. A forked child has its own watching thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any
from typing import Protocol

import torch.distributed as dist

from overlap_inductor.torch_compat.distributed import group_store

log = logging.getLogger("overlap_inductor")

INTERVAL, AGAIN, SHARE = 0.2, 0.01, 0.05
"""Seconds between two looks: ``INTERVAL`` before the first report of a place. After a report, ``SHARE`` of the time
since then, but at least ``AGAIN`` and at most ``INTERVAL``. A rank that reported a place will probably run the frame
uncompiled again, and its peers wait for each report. So they wait for about a tenth of the time between two reports.

A look costs about 0.16 ms of CPU time, most of it to wake the thread. Four ranks shared two cores, and a rank needed
1690 ms of CPU time for a step of 4.1 s. With ``AGAIN`` after every look, 65 ms of them were looks.
"""


class Watched(Protocol):
    """A group's counts.

    Attributes:
        lock: held while a call is counted.
        promised: the place that was reported last.
        told_inside: the number of the call that was reported last; -1 if there is none, or if the report was withdrawn.
    """

    lock: threading.Lock
    promised: int
    told_inside: int

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def prefix(self) -> str: ...
    def reached(self) -> int | None:
        """The place that this rank has reached outside of graphs since its last call. ``None`` if it is in a call, has
        issued nothing since, or is not inside a collective."""

    def inside(self) -> tuple[int, int] | None:
        """``(the call's number, how many collectives the backend has counted)``, if this rank is inside a collective of
        a call; otherwise ``None``."""


Seen = tuple[int | None, tuple[int, int] | None]


@dataclass(eq=False)
class _Looks:
    """The looks at one group.

    Attributes:
        seen: what the last look returned.
        reported: when the last place was reported, in seconds of ``time.monotonic()``; ``None`` if there is none.
    """

    state: weakref.ref[Watched]
    seen: Seen = (None, None)
    reported: float | None = None

    def interval(self, now: float) -> float:
        """Seconds from ``now`` to the next look."""
        return INTERVAL if self.reported is None else min(max(AGAIN, SHARE * (now - self.reported)), INTERVAL)


class _Watching:
    """The watching thread of this process."""

    def __init__(self) -> None:
        self._looks: list[_Looks] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def add(self, state: Watched) -> None:
        with self._lock:
            self._looks.append(_Looks(weakref.ref(state)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="overlap_inductor places", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Stop the thread. Waits at most five seconds for it: it may be in the middle of a report."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        interval = INTERVAL
        while not self._ended.wait(interval):
            for looks in tuple(self._looks):
                if not self._looked(looks):
                    with self._lock:
                        self._looks.remove(looks)
            now = time.monotonic()
            interval = min((looks.interval(now) for looks in tuple(self._looks)), default=INTERVAL)

    def _looked(self, looks: _Looks) -> bool:
        """Look once. Returns whether to look again: False if the group was destroyed, or if its store fails."""
        state = looks.state()
        if state is None:
            return False
        promised = state.promised
        try:
            looks.seen = report(state, looks.seen)
        except (KeyError, RuntimeError):
            return False
        except Exception:
            # A store that is written in Python may raise any error. The thread goes on with the other groups.
            log.warning("overlap_inductor: the ranks of group %r get no reports", state.prefix, exc_info=True)
            return False
        if state.promised > promised:
            looks.reported = time.monotonic()
        return True


_WATCHING = _Watching()
_STORES: weakref.WeakKeyDictionary[Watched, dist.Store] = weakref.WeakKeyDictionary()
"""The watching thread's own connections to the groups' stores."""
_OF_PARENT: list[Any] = []
"""In a forked child: what the parent uses. It is kept alive, because the end of a ``FileStore`` may delete its file."""


def watch(state: Watched) -> None:
    """Report the places that this rank reaches in the group of ``state``, until the group is destroyed."""
    _WATCHING.add(state)


def place_of(state: Watched, rank: int) -> int:
    """The place that ``rank`` of the group has reported last, or -1."""
    return _number(state, "reached", rank)


def call_of(state: Watched, rank: int) -> int:
    """If ``rank`` of the group has reported that it is inside a collective of a call, the call's number. Else -1."""
    return _number(state, "inside", rank)


def report(state: Watched, before: Seen) -> Seen:
    """Look once, and report what both this look and the last look have found. ``before``: what the last look returned.
    Returns what this look has found.

    Raises:
        KeyError: the group was destroyed.
        RuntimeError: the rank that keeps the group's store has ended.
    """
    if before != (None, None) and state not in _STORES:
        # Without the lock: if the store's rank has ended, the attempt to connect may take long.
        _STORES[state] = _own_connection(group_store(state.group))
    with state.lock:
        place, inside = now = state.reached(), state.inside()
        if place is not None and place == before[0] and place > state.promised:
            _write(state, "reached", place)
            state.promised = place
        if state.told_inside >= 0 and (inside is None or inside[0] != state.told_inside):
            # This rank has left the collective: a peer was only late.
            _write(state, "inside", -1)
            state.told_inside = -1
        if inside is not None and inside == before[1] and inside[0] != state.told_inside:
            _write(state, "inside", inside[0])
            state.told_inside = inside[0]
    return now


def _own_connection(store: dist.Store) -> dist.Store:
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        # A store that is written in Python may have no ``clone``. If the store's rank has ended, the next write raises.
        return store


def _write(state: Watched, what: str, number: int) -> None:
    group_store(state.group)  # raises if the group was destroyed
    _STORES[state].set(f"{state.prefix}/{what}/{state.group.rank()}", str(number))


def _number(state: Watched, what: str, rank: int) -> int:
    store, key = group_store(state.group), f"{state.prefix}/{what}/{rank}"
    return int(store.get(key)) if store.check([key]) else -1


def _after_fork() -> None:
    global _WATCHING, _STORES
    _OF_PARENT.append((_WATCHING, _STORES))
    _WATCHING, _STORES = _Watching(), weakref.WeakKeyDictionary()


def _at_exit() -> None:
    _WATCHING.end()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)

# SPDX-License-Identifier: Apache-2.0
"""Tells waiting ranks that this rank is inside a collective that it issued outside of graphs.

A rank may run a frame uncompiled whose graph its peers overlap. It publishes nothing before the frame's collective, and
the collective waits for the peers, while the peers wait for its plan::

    rank 0   (uncompiled) all_reduce: waits for rank 1
    rank 1   the graph's call: waits for the plan of rank 0

So each process has a thread that looks at its groups (``call_state``). It acts if the thread that calls graphs is
inside a collective, outside of graphs, and finds the backend's count unchanged at its next look. Then it writes
the place that the rank has reached to the group's store, once for each place. A report is a promise: this rank joins no
call that begins before the reported place. A waiting rank whose call does so runs its plain program. The rank that has
reported skips such a call (``call_board.skip``).

A report and the count of a call exclude each other by a lock. So a rank that has published a call makes no report about
the time before the call, and both sides decide by the same report.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

import torch.distributed as dist

from overlap_inductor.torch_compat.distributed import group_store

INTERVAL, AGAIN = 0.2, 0.01
"""Seconds between two looks before this process makes its first report, and after it. A rank that has run a frame
uncompiled will probably do so again, and its peers wait for each report."""


class Watched(Protocol):
    """A group's counts.

    Attributes:
        lock: held while a call is counted.
        promised: the place that was reported last.
    """

    lock: threading.Lock
    promised: int

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def prefix(self) -> str: ...
    def reached(self) -> int | None:
        """The place that this rank has reached outside of graphs since its last call. ``None`` if it is in a call, has
        issued nothing since, or is not inside a collective."""


_STATES: list[weakref.ref[Watched]] = []
_LOCK = threading.Lock()
_STARTED: list[threading.Thread] = []


def watch(state: Watched) -> None:
    """Report the places that this rank reaches in the group of ``state``, until the group is destroyed."""
    with _LOCK:
        _STATES.append(weakref.ref(state))
        if not _STARTED:
            _STARTED.append(threading.Thread(target=_watch, name="overlap_inductor places", daemon=True))
            _STARTED[0].start()


def place_of(state: Watched, rank: int) -> int:
    """The place that ``rank`` of the group has reported last, or -1."""
    store, key = group_store(state.group), _key(state, rank)
    return int(store.get(key)) if store.check([key]) else -1


def report(state: Watched, before: int | None) -> int | None:
    """Report the place that this rank has reached, if it is ``before``. Returns the place.

    Raises:
        KeyError: the group was destroyed.
        RuntimeError: the rank that keeps the group's store has ended.
    """
    with state.lock:
        place = state.reached()
        if place is not None and place == before and place > state.promised:
            group_store(state.group).set(_key(state, state.group.rank()), str(place))
            state.promised = place
    return place


def _key(state: Watched, rank: int) -> str:
    return f"{state.prefix}/reached/{rank}"


def _watch() -> None:
    seen: dict[weakref.ref[Watched], int | None] = {}
    interval = INTERVAL
    while True:
        time.sleep(interval)
        for reference in tuple(_STATES):
            state = reference()
            try:
                seen[reference] = report(state, seen.get(reference)) if state is not None else None
                if state is not None and state.promised >= 0:
                    interval = AGAIN
            except (KeyError, RuntimeError):
                state = None
            if state is None:
                seen.pop(reference, None)
                with _LOCK:
                    _STATES.remove(reference)

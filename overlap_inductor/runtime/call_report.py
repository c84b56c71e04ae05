# SPDX-License-Identifier: Apache-2.0
"""Tells waiting ranks that this rank is inside a collective that it issued outside of graphs.

A rank may run a frame uncompiled whose graph its peers overlap. It publishes nothing before the frame's collective, and
the collective waits for the peers, while the peers wait for its plan::

    rank 0   (uncompiled) all_reduce: waits for rank 1
    rank 1   the graph's call: waits for the plan of rank 0

So each process has a thread that looks at the counts of its groups (``call_state``). It writes the place that the rank
has reached to the group's store, once for each place. It does so only if the count has grown since the last call of a
graph, and then stays the same for ``INTERVAL`` seconds. A waiting rank whose call has an earlier place then knows that
the other rank will not join this call, and runs its plain program.

The two threads need no lock. The reporter reads the state, and reports only if it finds the same twice. Places only
grow, so an old report never names a place that its rank has not reached.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

import torch.distributed as dist

from overlap_inductor.torch_compat.distributed import group_store

INTERVAL = 0.2
"""Seconds between two looks at the counts."""


class Watched(Protocol):
    """A group's counts."""

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def prefix(self) -> str: ...
    def reached(self) -> int | None:
        """The place that this rank has reached outside of graphs since its last call, or ``None`` if it is in a call or
        has issued nothing since."""


_STATES: list[weakref.ref[Watched]] = []
_LOCK = threading.Lock()
_STARTED: list[threading.Thread] = []


def watch(state: Watched) -> None:
    """Report the places that this rank reaches in the group of ``state``, until the group is destroyed."""
    with _LOCK:
        _STATES.append(weakref.ref(state))
        if not _STARTED:
            _STARTED.append(threading.Thread(target=_report, name="overlap_inductor places", daemon=True))
            _STARTED[0].start()


def reported(state: Watched, rank: int) -> int | None:
    """The place that ``rank`` of the group has reported last, or ``None``."""
    store, key = group_store(state.group), _key(state, rank)
    return int(store.get(key)) if store.check([key]) else None


def _key(state: Watched, rank: int) -> str:
    return f"{state.prefix}/reached/{rank}"


def _report() -> None:
    seen: dict[weakref.ref[Watched], tuple[int | None, bool]] = {}
    while True:
        time.sleep(INTERVAL)
        for reference in tuple(_STATES):
            state = reference()
            before, told = seen.get(reference, (None, False))
            try:
                place = state.reached() if state is not None else None
                told = told and place == before
                if state is not None and place is not None and place == before and not told:
                    group_store(state.group).set(_key(state, state.group.rank()), str(place))
                    told = True
                seen[reference] = place, told
            except (KeyError, RuntimeError):
                # The group was destroyed, or the rank that kept its store has ended.
                state = None
            if state is None:
                seen.pop(reference, None)
                with _LOCK:
                    _STATES.remove(reference)

# SPDX-License-Identifier: Apache-2.0
"""The watchdog: a daemon thread that reads the fault records of the process's groups. It reports a fault even if no
later overlap call raises it (``FaultRecord.check``).

A program was *told* of a fault if ``check`` has raised the error, or if this rank has aborted the group. A fault is
handled in this order:

1. A fault is recorded on a *board*: host memory that ranks on one machine share (``runtime.board``). Within
   ``POLL_SECONDS``, the watchdog of each rank that shares the board stops the group's waits on its own GPU. It logs the
   error if the program was not told.
2. If the program was told, or has destroyed the group, it goes on. A destroyed group is watched until its calls have
   ended. If they end with a fault of which the program was not told, the group is watched until the program ends.
3. Any other program is ended by SIGABRT, ``GRACE_SECONDS`` after the fault was seen. The error and the stacks of all
   threads are written to standard error.
4. A program that ends without having been told gets exit status 1, because it may have used wrong results. Without a
   fault, the exit status is also 1 if calls are still in flight ``EXIT_SECONDS`` after the program's end. In both cases
   the exit hook ends the process at once, so exit hooks that were registered earlier do not run.

Without a fault, the watchdog reads one word of the host's memory for each group every ``POLL_SECONDS``. The only kind
of CUDA call is an event query for a destroyed group (``runtime.driver.beside_captures``). After a fork the child
watches nothing, because it cannot use the GPU. The watchdog cannot run while another thread blocks and holds Python's
lock.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("overlap_inductor")

GRACE_SECONDS = 60.0
"""Seconds between the time when the watchdog sees a fault and the end of the program. With ``math.inf`` a running
program is never ended."""
POLL_SECONDS = 0.1
EXIT_SECONDS = 10.0
"""Seconds that a program's end waits for calls in flight."""


class Watched(Protocol):
    """A fault record as the watchdog uses it (``runtime.faults.FaultRecord``)."""

    @property
    def told(self) -> bool: ...
    def error(self) -> str | None: ...
    def stop_waits(self) -> None: ...


@dataclass
class _Watch:
    faults: Watched
    alive: Callable[[], bool]
    in_flight: Callable[[], bool]
    seen: float | None = None

    def ended(self) -> bool:
        """Whether no call is in flight. False if CUDA has failed, because the state of the calls is then unknown."""
        try:
            return not self.in_flight()
        except RuntimeError:
            return False

    def untold(self) -> str | None:
        """The error that the program was not told of, or ``None``."""
        error = self.faults.error()
        return None if self.faults.told else error


def end_process(message: str) -> None:
    """Write ``message`` and the stacks of all threads to standard error, and end the process by SIGABRT."""
    os.write(2, f"{message}\n".encode())
    faulthandler.dump_traceback(2)
    # If faulthandler stayed enabled, it would write the stacks again when the signal arrives.
    faulthandler.disable()
    os.abort()


class Watchdog:
    """Watches fault records. The module's docstring says what it does about a fault."""

    def __init__(self, end: Callable[[str], None] = end_process, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = end
        self._clock = clock
        self._watches: list[_Watch] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def watch(self, faults: Watched, alive: Callable[[], bool], in_flight: Callable[[], bool] = lambda: False) -> None:
        """Watch ``faults`` as long as its group is ``alive``. After that, watch until no call is ``in_flight``. If
        the calls end with a fault of which the program was not told, watch until the program ends.

        Args:
            alive: returns True while the group is not destroyed.
            in_flight: returns True while calls run on the group's device. It may raise ``RuntimeError`` if CUDA failed.
        """
        with self._lock:
            self._watches.append(_Watch(faults, alive, in_flight))

    def start(self) -> None:
        """Check the records every ``POLL_SECONDS`` from now on, on a daemon thread. Does nothing if the thread was
        started before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="overlap_inductor watchdog", daemon=True)
                self._thread.start()

    def look(self) -> None:
        for watch in tuple(self._watches):
            # The record is read after ``alive``. So the record of a destroyed group holds all faults from before the
            # group's destruction.
            alive, error = watch.alive(), watch.faults.error()
            if error is not None and watch.seen is None:
                self._found(watch, error, alive)
            if not alive:
                self._left(watch, error)
            elif watch.seen is not None and not watch.faults.told and self._clock() - watch.seen >= GRACE_SECONDS:
                self._end(
                    f"overlap_inductor: {error} Within {GRACE_SECONDS:g} s no call raised this error to the program,"
                    " and the group was not destroyed. The process ends now."
                )

    def close(self) -> list[str]:
        """Stop watching, and wait up to ``EXIT_SECONDS`` for calls in flight. Returns the errors of all faults of which
        the program was not told, and an error if calls are still in flight."""
        self._closed.set()
        if self._thread is not None:
            # The thread must not be in the middle of a check while the interpreter ends.
            self._thread.join(5.0)
        deadline = time.monotonic() + EXIT_SECONDS
        while (
            waiting := [w for w in self._watches if not w.faults.told and w.untold() is None and not w.ended()]
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        late = (
            [
                f"calls were still in flight {EXIT_SECONDS:g} s after the program came to its end: they wait for peers"
                " that have not come, or CUDA has failed."
            ]
            if waiting
            else []
        )
        return [error for watch in self._watches if (error := watch.untold()) is not None] + late

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.look()

    def _found(self, watch: _Watch, error: str, alive: bool) -> None:
        watch.seen = self._clock()
        watch.faults.stop_waits()
        if not watch.faults.told and alive:
            log.error(
                "overlap_inductor: %s The process ends in %g s unless a call raises this error before.",
                error,
                GRACE_SECONDS,
            )
        elif not watch.faults.told:
            log.error(
                "overlap_inductor: %s The group has been destroyed, so no call can raise this error. The program will"
                " end with exit status 1.",
                error,
            )

    def _left(self, watch: _Watch, error: str | None) -> None:
        """Forget a destroyed group if its calls have ended without a fault, or if the program was told of the fault.

        A call that gives up or is stopped ends only after its fault is on the board. So the board is read again once
        all calls have ended.
        """
        watch.alive = _destroyed
        if watch.faults.told or error is None and watch.ended() and watch.faults.error() is None:
            with self._lock:
                self._watches.remove(watch)


def _destroyed() -> bool:
    return False


_WATCHDOG = Watchdog()


def watch(faults: Watched, alive: Callable[[], bool], in_flight: Callable[[], bool] = lambda: False) -> None:
    """See ``Watchdog.watch``."""
    _WATCHDOG.watch(faults, alive, in_flight)
    _WATCHDOG.start()


def _at_exit() -> None:
    errors = _WATCHDOG.close()
    if not errors:
        return
    for error in errors:
        os.write(2, f"overlap_inductor: {error} No call has raised this error, so the exit status is 1.\n".encode())
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(1)


def _after_fork() -> None:
    global _WATCHDOG
    _WATCHDOG = Watchdog()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)

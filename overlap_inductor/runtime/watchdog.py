"""The watchdog: one daemon thread a process that looks at the fault records of its groups, so that no fault goes unsaid
where no overlap op follows.

The next overlap call raises a fault by itself (``FaultRecord.check``). But a CUDA graph's replays never come there, nor
does a program stuck elsewhere (in a collective of a peer that is gone, in a stream wait), nor one whose last call it
was. What happens about a fault, in this order:

1. Within ``POLL_SECONDS``, on every rank of the group, the log names site, group and peer. The group's waits on this
   GPU are stopped, where whoever gave up could not reach them. (There are no stream waits to free: every wait is a
   kernel's, which a clock bounds.)
2. A program that is *told* goes on as it likes: ``check`` has raised the error to it, or it has aborted the group
   itself. So does one that has destroyed the group, which can start nothing more of it. What it had started goes on: a
   destroyed group is watched until its calls have ended.
3. Any other is ended ``GRACE_SECONDS`` after the fault was seen, by SIGABRT, with the error and the stacks of all
   threads on standard error: as ProcessGroupNCCL's watchdog ends a process on a timeout
   (``TORCH_NCCL_ASYNC_ERROR_HANDLING=3``, its default).
4. A program that comes to its end without having been told, its group destroyed or not, ends with exit status 1: it may
   have handed out what a kernel left behind that gave up. (Exit hooks that were registered before this module's do not
   run then.) A fault may come as late as that: calls that are in flight at the end have ``EXIT_SECONDS`` to end; where
   they go on waiting for their peers the program ends in the same way.

While all is well a look reads one word of the host's memory a group, and calls nothing of CUDA, but for an event's
query where a group has been destroyed (``runtime.driver.beside_captures``). After a fork the child watches nothing:
it can use no GPU. What it cannot do: go on beside a thread that blocks while it holds Python's lock.
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
"""Seconds that a program has, after a fault, to be told or to destroy the group. ``math.inf``: it is never ended while
it runs."""
POLL_SECONDS = 0.1
EXIT_SECONDS = 10.0
"""That a program's end waits for calls that are in flight."""


class Watched(Protocol):
    """What the watchdog needs of a fault record (``runtime.faults.FaultRecord``)."""

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
        """Whether no call is in flight. Where CUDA has failed no call is known to have ended."""
        try:
            return not self.in_flight()
        except RuntimeError:
            return False

    def untold(self) -> str | None:
        """The error that the program has not been told of."""
        error = self.faults.error()
        return None if self.faults.told else error


def end_process(message: str) -> None:
    """Write ``message`` and the stacks of all threads to standard error, and end the process by SIGABRT."""
    os.write(2, f"{message}\n".encode())
    faulthandler.dump_traceback(2)
    # (Else the signal would have the stacks written again.)
    faulthandler.disable()
    os.abort()


class Watchdog:
    """Watches fault records; see the top of the file for what it does about a fault.

    Args:
        end: ends the process, with a message.
        clock: seconds.
    """

    def __init__(self, end: Callable[[str], None] = end_process, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = end
        self._clock = clock
        self._watches: list[_Watch] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def watch(self, faults: Watched, alive: Callable[[], bool], in_flight: Callable[[], bool] = lambda: False) -> None:
        """Look at ``faults``, too, for as long as its group is ``alive``, and behind that until nothing is
        ``in_flight`` on its device."""
        with self._lock:
            self._watches.append(_Watch(faults, alive, in_flight))

    def start(self) -> None:
        """Look every ``POLL_SECONDS`` from now on, on a thread that does not keep the process from ending."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="overlap_inductor watchdog", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Look at every record once."""
        for watch in tuple(self._watches):
            # First the group, then its record: a fault that came before the group was destroyed is seen.
            alive, error = watch.alive(), watch.faults.error()
            if error is not None and watch.seen is None:
                self._found(watch, error, alive)
            if not alive:
                self._left(watch, error)
            elif watch.seen is not None and not watch.faults.told and self._clock() - watch.seen >= GRACE_SECONDS:
                self._end(
                    f"overlap_inductor: {error} In {GRACE_SECONDS:g} s no call has raised this error to the program,"
                    " and the group still stands: the process is ended."
                )

    def close(self) -> list[str]:
        """Stop watching. Returns the errors of all faults that the program has not been told of, those of destroyed
        groups included."""
        self._closed.set()
        if self._thread is not None:
            # (Not for long: it may be looking just now, and a thread in the middle of a look must not meet the
            # interpreter's end.)
            self._thread.join(5.0)
        # (Its clock is the program's, whatever this one is given.)
        deadline = time.monotonic() + EXIT_SECONDS
        while (
            waiting := [w for w in self._watches if not w.faults.told and w.untold() is None and not w.ended()]
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        late = (
            [
                f"calls were in flight for {EXIT_SECONDS:g} s when the program came to its end: they wait for "
                "peers that have not come, or CUDA has failed."
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
                "overlap_inductor: %s The process is ended in %g s, unless a call raises this error before.",
                error,
                GRACE_SECONDS,
            )
        elif not watch.faults.told:
            log.error(
                "overlap_inductor: %s The group has been destroyed, so that no call can raise this error: the "
                "program will end with exit status 1.",
                error,
            )

    def _left(self, watch: _Watch, error: str | None) -> None:
        """A destroyed group is forgotten when its calls have ended well, or its program has been told of its fault;
        else it is kept for the program's end.

        (First the calls, then the record again: a call that has given up, or was stopped, has left its record by its
        end. What peers do of each other behind that is no fault of this rank's results.)"""
        watch.alive = _destroyed
        if watch.faults.told or error is None and watch.ended() and watch.faults.error() is None:
            with self._lock:
                self._watches.remove(watch)


def _destroyed() -> bool:
    return False


_WATCHDOG = Watchdog()


def watch(faults: Watched, alive: Callable[[], bool], in_flight: Callable[[], bool] = lambda: False) -> None:
    """Have the process's watchdog watch a group's fault record: see ``Watchdog.watch``."""
    _WATCHDOG.watch(faults, alive, in_flight)
    _WATCHDOG.start()


def _at_exit() -> None:
    errors = _WATCHDOG.close()
    if not errors:
        return
    for error in errors:
        os.write(
            2, f"overlap_inductor: {error} The program ends without having been told: its exit status is 1.\n".encode()
        )
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

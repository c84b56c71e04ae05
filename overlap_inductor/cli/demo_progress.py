# SPDX-License-Identifier: Apache-2.0
"""Shows the steps of the demo's rank 0 while they run, and collects the results of rank 0."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any
from typing import TextIO


class Progress:
    """Shows rank 0's steps, and how long each step takes. On a terminal, the time of the running step counts up.

    The thread that reads rank 0's output calls ``line``. The thread that watches the ranks calls ``wait``
    repeatedly, to show the time of the running step.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.results: list[dict[str, Any]] = []
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._start("starting the ranks")

    def line(self, text: str) -> None:
        """Take one line of rank 0's standard output. A line that is not a JSON object is shown."""
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        with self._lock:
            if not isinstance(record, dict):
                self._write(f"\n  | {text}\n")
            elif "step" in record:
                self._finish()
                self._start(record["step"])
            elif "part" in record:
                self.results.append(record)

    def wait(self) -> None:
        if self._live:
            with self._lock:
                self._write(f"\r\x1b[K  {self._step} ... {time.monotonic() - self._begin:.0f} s")

    def finish(self) -> None:
        with self._lock:
            self._finish()

    def _start(self, step: str) -> None:
        self._step, self._begin = step, time.monotonic()
        self._write(f"  {step} ...")

    def _finish(self) -> None:
        again = f"\r\x1b[K  {self._step} ..." if self._live else ""
        self._write(f"{again} {time.monotonic() - self._begin:.1f} s\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

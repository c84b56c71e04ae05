# SPDX-License-Identifier: Apache-2.0
"""Distinguish the runs that write to one dump folder. Each run has an id, which is the same on all of its ranks.

A rank writes a report when it compiles a graph. Other ranks may compile at other times, so the ranks cannot
communicate to agree on the id. The id is made of:

1. the launcher's variables that are the same on all ranks;
2. the launching process, if all ranks share one;
3. the number of earlier processes that wrote for the same rank with equal values of 1 and 2. With the defaults of
   ``torchrun`` on several hosts, only this number differs between runs.

``run.json`` beside a graph's report holds the id. A later run overwrites both files.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path

MARK = "run.json"
_LAUNCHER = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
)

_lock = threading.Lock()
_begun: dict[tuple[str, Path], tuple[str, str]] = {}


@dataclass(frozen=True)
class Mark:
    """The content of ``run.json``.

    Attributes:
        run: id of the run, the same on all ranks.
        date: when the process wrote its first report (UTC, ISO 8601).
        process: host, process id and start of the process.
        number: index of the report among the process's reports, from 0 on.
        headline: ``words.headline`` of the report.
        estimate: text with the estimated times as written and by the plan; empty without an estimate.
        text: digest of ``report.txt``, to find ranks that wrote the same text.
    """

    run: str
    date: str
    process: str
    number: int
    headline: str
    estimate: str
    text: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_mark(place: Path) -> Mark | None:
    """The mark in a graph's folder. ``None`` if there is none, or if the file does not hold a ``Mark`` of this
    version of the package."""
    try:
        return Mark(**json.loads((place / MARK).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def this_process() -> str:
    """Host, process id and start of this process. If ``/proc`` exists, no other process gives this text."""
    return f"{socket.gethostname()}:{_process(os.getpid())}"


def begin(rank_folder: Path) -> tuple[str, str]:
    """``(id of this process's run, date)`` for reports below ``rank_folder``, the same on each call.

    The id is 8 hex digits. If earlier processes wrote there under these digits, ``-2``, ``-3``, ... follows. The date
    is that of the first call (UTC, ISO 8601).
    """
    # A forked process inherits its parent's table, but needs an entry of its own.
    key = this_process(), rank_folder
    with _lock:
        if key not in _begun:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            _begun[key] = _free_id(rank_folder, launch_key(os.environ)), now
        return _begun[key]


def _free_id(rank_folder: Path, digits: str) -> str:
    taken = [mark.run.partition("-") for mark in map(read_mark, rank_folder.glob("*")) if mark is not None]
    number = max((int(n or 1) for name, _, n in taken if name == digits), default=0) + 1
    return digits if number == 1 else f"{digits}-{number}"


def launch_key(environment: Mapping[str, str]) -> str:
    """8 hex digits, the same on all ranks of a run."""
    parts = [f"{name}={environment[name]}" for name in _LAUNCHER if name in environment]
    world_size = environment.get("WORLD_SIZE")
    if world_size is None and multiprocessing.parent_process() is None:
        parts.append(this_process())
    elif environment.get("LOCAL_WORLD_SIZE", world_size) == world_size:
        # All ranks are on this host, and one process started them. This is assumed without ``LOCAL_WORLD_SIZE``.
        parts.append(f"{socket.gethostname()}:{_process(os.getppid())}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _process(number: int) -> str:
    """``pid:start``. The start (clock ticks since boot) tells apart processes with a reused pid. It is empty without
    ``/proc``."""
    try:
        start = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        start = ""
    return f"{number}:{start}"

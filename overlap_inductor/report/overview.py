# SPDX-License-Identifier: Apache-2.0
"""The page over all graphs and ranks of a dump folder: ``<folder>/index.html``."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from overlap_inductor.report.files import replace_file
from overlap_inductor.report.folder import Run
from overlap_inductor.report.folder import Written
from overlap_inductor.report.folder import runs_of
from overlap_inductor.report.groups import ranges
from overlap_inductor.report.html.environment import render

PAGE = "index.html"
_SHARE = 20
"""A process makes the page again at the earliest after this many times what it took last: 5 % of a compile's time."""
_TRIES = 3

_lock = threading.Lock()
_due: dict[Path, float] = {}


@dataclass(frozen=True)
class GraphRow:
    """A graph of a run on the ranks that wrote the same report of it. ``links``: (rank, path from the dump folder)."""

    graph: str
    ranks: str
    headline: str
    estimate: str
    links: tuple[tuple[int, str], ...]


def write_overview(dump: Path) -> Path:
    """Make ``<dump>/index.html`` from what the folder holds. Raises ``OSError`` if it cannot be written.

    Ranks write it at the same time, each as a whole. The last one to replace the page looks again afterwards, so that
    no report is missing for good.
    """
    for _ in range(_TRIES):
        runs = runs_of(dump)
        replace_file(dump / PAGE, render_overview(dump, runs))
        if runs_of(dump) == runs:
            break
    return dump / PAGE


def keep_overview(dump: Path) -> None:
    """Make the page after a report was written, if the last time is long enough ago, and once more when the process
    ends. Raises ``OSError`` if it cannot be written."""
    start = time.monotonic()
    with _lock:
        if dump not in _due:
            atexit.register(_at_exit, dump)
        elif start < _due[dump]:
            return
        _due[dump] = float("inf")
    try:
        write_overview(dump)
    finally:
        now = time.monotonic()
        with _lock:
            _due[dump] = now + _SHARE * (now - start)


def render_overview(dump: Path, runs: list[Run]) -> str:
    """The page's text: the runs, newest first, each with its graphs."""
    return render(
        "overview.html",
        runs=[(run, ranges(run.ranks), graph_rows(dump, run)) for run in reversed(runs)],
    )


def graph_rows(dump: Path, run: Run) -> list[GraphRow]:
    """A run's graphs in the order in which they were compiled, ranks with the same report in one row."""
    alike: dict[tuple[str, str], list[Written]] = {}
    for written in run.reports:
        alike.setdefault((written.place.name, written.mark.text if written.mark else str(written.place)), []).append(
            written
        )
    rows = []
    for (graph, _), members in alike.items():
        mark = members[0].mark
        links = tuple((w.rank, (w.place / PAGE).relative_to(dump).as_posix()) for w in members)
        row = GraphRow(
            graph,
            ranges(w.rank for w in members),
            mark.headline if mark else "",
            mark.estimate if mark else "",
            links,
        )
        rows.append((mark.number if mark else 0, row))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def _at_exit(dump: Path) -> None:
    if dump.is_dir():
        try:
            write_overview(dump)
        except OSError as error:
            # Python is on its way out; there may be no logging any more.
            print(f"overlap_inductor: {dump / PAGE} could not be written: {error}", file=sys.stderr)

# SPDX-License-Identifier: Apache-2.0
"""Write ``<folder>/index.html``, the page that lists the reports of all graphs and ranks in a dump folder."""

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
"""After a write that took ``t``, ``keep_overview`` skips writes for ``_SHARE * t``. So writing takes at most 5 % of the
time."""
_TRIES = 3
"""The most times that one ``write_overview`` writes the page, if ranks add reports during each write."""

_lock = threading.Lock()
_due: dict[Path, float] = {}


@dataclass(frozen=True)
class GraphRow:
    """A row of the page: a graph of a run, and the ranks that wrote the same report of it.

    ``links``: for each rank, ``(rank, path of its report relative to the dump folder)``.
    """

    graph: str
    ranks: str
    headline: str
    estimate: str
    links: tuple[tuple[int, str], ...]


def write_overview(dump: Path) -> Path:
    """Write ``<dump>/index.html`` and return its path. Raises ``OSError`` if the page cannot be written.

    If another rank adds a report meanwhile, the page is written again, up to ``_TRIES`` times in all.
    """
    for _ in range(_TRIES):
        runs = runs_of(dump)
        replace_file(dump / PAGE, render_overview(dump, runs))
        if runs_of(dump) == runs:
            break
    return dump / PAGE


def keep_overview(dump: Path) -> None:
    """Write the page now, and once more when the process ends. Call this after each report. Raises ``OSError`` if the
    page cannot be written.

    The page is not written now if the last write was too recent (``_SHARE``) or another thread writes it.
    """
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
    """The page as HTML: the runs, newest first, each with its graphs."""
    return render(
        "overview.html",
        runs=[(run, ranges(run.ranks), graph_rows(dump, run)) for run in reversed(runs)],
    )


def graph_rows(dump: Path, run: Run) -> list[GraphRow]:
    """The rows of a run, in the order of the compiles. Ranks with the same report of a graph share a row."""
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
            # Python is shutting down, so logging may no longer work.
            print(f"overlap_inductor: {dump / PAGE} could not be written: {error}", file=sys.stderr)

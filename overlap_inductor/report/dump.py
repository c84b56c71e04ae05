# SPDX-License-Identifier: Apache-2.0
"""Write each graph's report to ``<folder>/rank_<r>/<graph id>_<phase>/``.

The files are the report as text, as JSON and as an HTML page, and the graph before and after the pass.

A report that is written twice gives the same bytes. Two other files depend on time and process: ``run.json`` beside the
report, and ``<folder>/index.html``, the page of all graphs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from pathlib import Path

from overlap_inductor.report import runs
from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.files import replace_file
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.overview import keep_overview
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text

log = logging.getLogger(__name__)

FILES = ("report.txt", "sites.json", "graph.before.txt", "graph.after.txt", "index.html")

_lock = threading.Lock()
_written: dict[Path, list[str]] = {}
_numbers: dict[Path, int] = {}
_warned: set[str] = set()


def write_dump(report: OverlapReport, folder: str | os.PathLike[str], rank: int) -> Path | None:
    """Write one graph's report below ``folder`` and return the path of the report's folder. If the files cannot be
    written, log a warning once and return ``None``: a compile must not fail for a report.

    If reports with the same graph id and phase differ, the folders of the later reports get the suffixes ``_2``,
    ``_3``, ... in the order of the compiles.
    """
    digest = hashlib.sha256(report.to_json(graphs=True).encode()).hexdigest()
    dump = Path(folder).absolute()
    place = _place(dump / f"rank_{rank}" / f"{_safe(report.graph)}_{_safe(report.phase)}", digest)
    try:
        place.mkdir(parents=True, exist_ok=True)
        texts = {**_contents(report), runs.MARK: _mark(report, place).to_json()}
        # The page is written last: a reader that waits for index.html finds the other files complete.
        for name in sorted(texts, key="index.html".__eq__):
            replace_file(place / name, texts[name])
        keep_overview(dump)
    except OSError as error:
        _warn_once(str(folder), error)
        return None
    return place


def _contents(report: OverlapReport) -> dict[str, str]:
    texts = (render_text(report), report.to_json(), report.before, report.after, render_html(report))
    return dict(zip(FILES, texts, strict=True))


def _mark(report: OverlapReport, place: Path) -> runs.Mark:
    with _lock:
        number = _numbers.setdefault(place, len(_numbers))
    times = totals.of_report(report)
    run, date = runs.begin(place.parent)
    return runs.Mark(
        run=run,
        date=date,
        process=runs.this_process(),
        number=number,
        headline=words.headline(report),
        estimate=times.text() if times else "",
        text=hashlib.sha256(render_text(report).encode(errors="backslashreplace")).hexdigest()[:16],
    )


def _place(path: Path, digest: str) -> Path:
    with _lock:
        digests = _written.setdefault(path, [])
        if digest not in digests:
            digests.append(digest)
        number = digests.index(digest) + 1
    return path if number == 1 else path.with_name(f"{path.name}_{number}")


def _safe(name: str) -> str:
    """A name that is one path component on every file system."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:120] or "graph"


def _warn_once(folder: str, error: OSError) -> None:
    with _lock:
        first = folder not in _warned
        _warned.add(folder)
    if first:
        log.warning(
            "the reports cannot be written to %s (%s); compiling goes on without them. "
            "Set OVERLAP_INDUCTOR_DUMP to a folder to which this process may write, on a disk with free space.",
            folder,
            error,
        )

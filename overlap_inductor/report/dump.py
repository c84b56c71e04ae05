"""Write a folder of reports: ``<folder>/rank_<r>/<graph id>_<phase>/`` with text, JSON, both graphs and a page.

Nothing in it depends on the time or the process, so a report that is written twice gives the same bytes twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from pathlib import Path

from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text

log = logging.getLogger(__name__)

FILES = ("report.txt", "sites.json", "graph.before.txt", "graph.after.txt", "index.html")

_lock = threading.Lock()
_written: dict[Path, list[str]] = {}
_warned: set[str] = set()


def write_dump(report: OverlapReport, folder: str | os.PathLike[str], rank: int) -> Path | None:
    """Write one graph's report below ``folder`` and return where; ``None`` if the folder cannot be written.

    The same report again overwrites its files with the same content. Another report of the same name in one process
    gets the suffix ``_2``, ``_3``, ... in the order of the compiles, which a second run repeats. A folder that cannot
    be written is logged once as a warning and raises no error: a report is not worth a failed compile.
    """
    digest = hashlib.sha256(report.to_json(graphs=True).encode()).hexdigest()
    place = _place(Path(folder) / f"rank_{rank}" / f"{_safe(report.graph)}_{_safe(report.phase)}", digest)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in _contents(report).items():
            _replace(place / name, text)
    except OSError as error:
        _warn_once(str(folder), error)
        return None
    return place


def _contents(report: OverlapReport) -> dict[str, str]:
    # The page comes last: a reader that waits for index.html finds the other files complete.
    texts = (render_text(report), report.to_json(), report.before, report.after, render_html(report))
    return dict(zip(FILES, texts, strict=True))


def _place(path: Path, digest: str) -> Path:
    with _lock:
        digests = _written.setdefault(path.absolute(), [])
        if digest not in digests:
            digests.append(digest)
        number = digests.index(digest) + 1
    return path if number == 1 else path.with_name(f"{path.name}_{number}")


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all: several processes may write the same report at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
            "Set OVERLAP_INDUCTOR_DUMP to a folder that this process may write, with space left on it.",
            folder,
            error,
        )

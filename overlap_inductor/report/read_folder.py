# SPDX-License-Identifier: Apache-2.0
"""Read a dump folder back: the ``report.txt`` of every graph, run by run. A text that several ranks wrote appears
once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from overlap_inductor.errors import OverlapError
from overlap_inductor.report.folder import Run
from overlap_inductor.report.folder import dumps_below
from overlap_inductor.report.folder import rank_of
from overlap_inductor.report.folder import runs_of
from overlap_inductor.report.groups import ranges


def read_reports(folder: str) -> str:
    """All reports below ``folder``, each headed by its graph and the ranks that wrote it. If there are several runs, a
    line with the id and date heads each run, oldest first.

    Raises:
        OverlapError: there is no such folder, or no report below it.
    """
    place = Path(folder)
    sections = []
    for dump in _dumps(place):
        prefix, runs = _prefix(dump, place), runs_of(dump)
        for run in runs:
            sections += [f"######## {prefix}{run.title}"] if len(runs) > 1 else []
            sections += _sections(run, prefix)
    return "\n\n".join(sections)


class GraphFolder(NamedTuple):
    """One rank's folder of one graph. ``prefix``: path from the caller's folder to the dump, with a slash at its end,
    or empty."""

    prefix: str
    rank: int
    path: Path


def graph_folders(folder: str) -> list[GraphFolder]:
    """The folders of all graphs below ``folder``, run by run.

    Raises:
        OverlapError: as ``read_reports``.
    """
    place = Path(folder)
    return [
        GraphFolder(_prefix(dump, place), written.rank, written.place)
        for dump in _dumps(place)
        for run in runs_of(dump)
        for written in run.reports
    ]


def _prefix(dump: Path, place: Path) -> str:
    return "" if dump == place or rank_of(dump) is not None else f"{dump.relative_to(place)}/"


def page_folders(folder: str) -> list[Path]:
    """The dump folders at and below ``folder`` that have a page of all graphs. The folder of a single rank has none.

    Raises:
        OverlapError: as ``read_reports``.
    """
    return [dump for dump in _dumps(Path(folder)) if rank_of(dump) is None]


def _dumps(place: Path) -> list[Path]:
    if not place.is_dir():
        raise OverlapError(f"{place} is not a folder; expected the folder that OVERLAP_INDUCTOR_DUMP named")
    found = dumps_below(place)
    if not found:
        raise OverlapError(
            f"{place} holds no report; expected rank_<r>/<graph>_<phase>/report.txt below it. "
            "Set OVERLAP_INDUCTOR_DUMP to a folder and OVERLAP_INDUCTOR=on or report, then compile a model."
        )
    return found


def _sections(run: Run, prefix: str) -> list[str]:
    graphs: dict[str, dict[str, list[int]]] = {}
    for written in run.reports:
        text = (written.place / "report.txt").read_text(encoding="utf-8")
        graphs.setdefault(written.place.name, {}).setdefault(text, []).append(written.rank)
    sections = []
    for graph, texts in graphs.items():
        for text, ranks in texts.items():
            head = f"{prefix}{graph}, rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
            sections.append(f"{head}\n{'=' * len(head)}\n{text}")
    return sections

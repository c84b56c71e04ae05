# SPDX-License-Identifier: Apache-2.0
"""List the reports in a dump folder (``<folder>/rank_<r>/<graph id>_<phase>/``), by run and by graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overlap_inductor.report.runs import Mark
from overlap_inductor.report.runs import read_mark

RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True)
class Written:
    """The folder of one rank's report of a graph. ``mark``: the content of the folder's ``run.json``.
    ``None`` if there is no such file, or if ``read_mark`` cannot read it."""

    rank: int
    place: Path
    mark: Mark | None


@dataclass(frozen=True)
class Run:
    """The reports of one run. ``id`` and ``date`` are empty for reports without a mark."""

    id: str
    date: str
    reports: tuple[Written, ...]

    @property
    def ranks(self) -> list[int]:
        return sorted({written.rank for written in self.reports})

    @property
    def title(self) -> str:
        """The run's name for readers, for example ``Run 1a2b3c4d, 2025-11-23 22:35:10 UTC``."""
        if not self.id:
            return "Reports of no known run"
        return f"Run {self.id}, {self.date.replace('T', ' ').replace('+00:00', ' UTC')}"


def rank_of(path: Path) -> int | None:
    """The rank in the name of a folder: 3 for ``.../rank_3``. ``None`` for a folder with another name."""
    match = RANK.fullmatch(path.name or path.absolute().name)
    return int(match[1]) if match else None


def dumps_below(place: Path) -> list[Path]:
    """The dump folders at and below ``place``. A single rank's folder counts as a dump folder if it is ``place``
    itself."""
    if rank_of(place) is not None and any(place.glob("*/report.txt")):
        return [place]
    return sorted({file.parent.parent.parent for file in place.rglob("rank_*/*/report.txt")})


def runs_of(dump: Path) -> list[Run]:
    """The runs that wrote to a dump folder, oldest first. Reports are in the order of graphs and ranks."""
    found: dict[str, list[Written]] = {}
    for written in _reports(dump):
        found.setdefault(written.mark.run if written.mark else "", []).append(written)
    runs = []
    for identity, reports in found.items():
        date = min((w.mark.date for w in reports if w.mark), default="")
        runs.append(Run(identity, date, tuple(sorted(reports, key=lambda w: (natural(w.place.name), w.rank)))))
    return sorted(runs, key=lambda run: (run.date, run.id))


def _reports(dump: Path) -> Iterator[Written]:
    for rank_folder in [dump] if rank_of(dump) is not None else dump.glob("rank_*"):
        rank = rank_of(rank_folder)
        if rank is not None:
            for file in rank_folder.glob("*/report.txt"):
                yield Written(rank, file.parent, read_mark(file.parent))


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key under which ``2_0`` comes before ``10_0``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]

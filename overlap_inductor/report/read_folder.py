"""Read a dump folder back: every graph's ``report.txt``, one copy for all ranks with the same text."""

from __future__ import annotations

import re
from pathlib import Path

from overlap_inductor.errors import OverlapError
from overlap_inductor.report.groups import ranges


def read_reports(folder: str) -> str:
    """All reports below ``folder``, one after the other. Each is headed by its graph and the ranks that wrote it.

    Raises:
        OverlapError: there is no such folder, or no report below it.
    """
    place = Path(folder)
    if not place.is_dir():
        raise OverlapError(f"{folder} is no folder; expected the one that OVERLAP_INDUCTOR_DUMP named")
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    # ``folder`` may also be that of one rank.
    files = [*place.rglob("rank_*/*/report.txt"), *(place.glob("*/report.txt") if _rank(place) is not None else ())]
    for file in sorted(files, key=lambda path: _natural(str(path))):
        rank = _rank(file.parent.parent)
        if rank is not None:
            above = file.parent.parent.parent
            prefix = "" if above in (place, place.parent) else f"{above.relative_to(place)}/"
            texts = found.setdefault((prefix, file.parent.name), {})
            texts.setdefault(file.read_text(encoding="utf-8"), []).append(rank)
    if not found:
        raise OverlapError(
            f"{folder} holds no report; expected rank_<r>/<graph>_<phase>/report.txt below it. "
            "Set OVERLAP_INDUCTOR_DUMP to a folder and OVERLAP_INDUCTOR=on or report, and compile something."
        )
    sections = []
    for (prefix, graph), texts in found.items():
        for text, ranks in texts.items():
            head = f"{prefix}{graph}, rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
            sections.append(f"{head}\n{'=' * len(head)}\n{text}")
    return "\n\n".join(sections)


def _rank(path: Path) -> int | None:
    match = re.fullmatch(r"rank_(\d+)", path.name or path.absolute().name)
    return int(match[1]) if match else None


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key under which ``2_0`` comes before ``10_0``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]

"""Golden texts: report, graph before and graph after of every spelling and structure, the same on every rank of every
world.

The files in ``golden/`` are for the torch version below; EXPECTTEST_ACCEPT=1 writes them anew (read the difference).
Whole graphs stand there for two ranks (of a gather and a scatter for more, too), reports for more; on every torch
version the text must be the same on all ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from tests.compile.spellings import KEPT
from tests.compile.spellings import SPELLINGS
from tests.compile.spellings import STRUCTURES
from tests.compile.spellings import Function
from tests.compile.spellings import Make
from tests.fake_group import fake_group
from tests.fake_group import reports_of
from tests.graph_text import waste

GOLDEN = Path(__file__).parent / "golden"
TORCH = "2.13"
ROWS: dict[str, tuple[Function, tuple[Make, ...]]] = {
    **{f"row {k}": v[:2] for k, v in SPELLINGS.items()},
    **{f"row {k}": v for k, v in KEPT.items()},
    **STRUCTURES,
}
WITHOUT_OVERLAP_TOO = {"row D of unbacked sizes on dim 1": "2.12"}
"""Rows that a torch version cannot trace, whatever the backend."""
WHOLE = {"row A", "row G"}
"""Rows whose graphs stand there for every world."""


def reports(row: str, world_size: int, rank: int) -> list[OverlapReport]:
    fn, makes = ROWS[row]
    trained = row.endswith("trained")
    with fake_group(world_size, rank), torch.set_grad_enabled(trained):
        arguments = [make(world_size).requires_grad_(trained) for make in makes]
        return reports_of(fn, *arguments, sub_chunks=1)


def text(found: list[OverlapReport], graphs: bool) -> str:
    parts = []
    for report in found:
        assert waste(report) == []
        parts.append(render_text(report))
        if graphs:
            parts += [
                "before\n" + report.before,
                "after\n" + report.after if report.after != report.before else "after: the same\n",
            ]
    joined = "\n".join(parts)
    # Versions and hashes change with every release.
    return re.sub(
        r"plan [0-9a-f]{16}|torch [0-9][\w.+]*|overlap_inductor [0-9][\w.]*", lambda m: m[0].split()[0] + " ...", joined
    )


@pytest.mark.parametrize("row", ROWS)
def test_golden(row: str) -> None:
    """Any change of what is found, decided, written or said."""
    if (broken := WITHOUT_OVERLAP_TOO.get(row)) and torch.__version__.startswith(broken):
        pytest.skip(f"torch {broken} fails to trace it for backend eager, too")
    pinned = torch.__version__.startswith(TORCH)
    sections = []
    for world_size in (2, 3, 8, 64) if pinned else (2, 8):
        ranks = {0, world_size // 2, world_size - 1} if world_size < 64 else {0, world_size - 1}
        texts = {text(reports(row, world_size, rank), graphs=world_size == 2 or row in WHOLE) for rank in sorted(ranks)}
        assert len(texts) == 1, f"{world_size} ranks have {len(texts)} texts"
        sections.append(f"==== {world_size} ranks\n{texts.pop()}")
    if not pinned:
        return
    file = GOLDEN / (re.sub(r"\W+", "_", row).strip("_") + ".txt")
    found = "\n".join(sections).rstrip() + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text()


def test_no_golden_file_is_left_over() -> None:
    """A row that was renamed or dropped."""
    expected = {re.sub(r"\W+", "_", row).strip("_") + ".txt" for row in ROWS}
    assert {f.name for f in GOLDEN.glob("*.txt")} == expected

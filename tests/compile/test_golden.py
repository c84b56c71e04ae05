# SPDX-License-Identifier: Apache-2.0
"""Compares the report and the graphs of every spelling and structure with golden files, and between ranks.

The golden files are for one torch version. A file holds the reports for each number of ranks, and the graphs for 2
ranks. The files of spellings A and G hold the graphs for each number of ranks. On every torch version, the first and
the last rank must have one text.

``make test`` makes the texts for 2 and 8 ranks, and those of spellings A and G for every size. ``make test-thorough``
makes the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import pytest
import torch

from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import summary
from tests.support import exchange_spellings
from tests.support import sequence_blocks
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.golden import FOLDER
from tests.support.golden import check_golden
from tests.support.golden import report_text
from tests.support.graph_text import waste
from tests.support.spellings import KEPT
from tests.support.spellings import SPELLINGS
from tests.support.spellings import Function
from tests.support.spellings import Make
from tests.support.structures import STRUCTURES

TORCH = "2.13"
ENDS = {2: (0, 1), 8: (0, 7)}
"""``{number of ranks: its first and last rank}``. A golden file is only written if the texts of these ranks are equal.
So ``make test`` compares one text for each number: that of the first of 2 ranks, and that of the last of 8."""
MIDDLES = {3: (1,), 64: (40,)}
"""``{number of ranks: one rank in the middle}``. Its text is only compared with the golden file."""
OF_SITES = {**SPELLINGS, **exchange_spellings.SPELLINGS}
SITES = {f"spelling {k}": v[2] for k, v in OF_SITES.items()}
"""``{spelling: pattern, dim and roles}`` of each spelling that becomes one site."""
GRAPHS: dict[str, tuple[Function, tuple[Make, ...]]] = {
    **{f"spelling {k}": v[:2] for k, v in OF_SITES.items()},
    **{f"spelling {k}": v for k, v in KEPT.items()},
    **STRUCTURES,
}
WITHOUT_OVERLAP_TOO = {"spelling D of unbacked sizes on dim 1": "2.12"}
"""``{graph: torch version}`` that cannot trace the graph, even without overlap."""
WHOLE = {"spelling A", "spelling G"}
"""Graphs whose golden files hold the graph for groups of every size."""


def file_of(name: str) -> str:
    return "spellings/" + re.sub(r"\W+", "_", name).strip("_") + ".txt"


def reports(name: str, world_size: int, rank: int) -> list[OverlapReport]:
    fn, makes = GRAPHS[name]
    trained = name.endswith("trained")
    with fake_group(world_size, rank), torch.set_grad_enabled(trained):
        arguments = [make(world_size).requires_grad_(trained) for make in makes]
        return reports_of(fn, *arguments, sub_chunks=1)


def text(found: list[OverlapReport], graphs: bool) -> str:
    parts = []
    for report in found:
        assert waste(report) == []
        parts.append(report_text(report))
        if graphs:
            parts += [
                "before\n" + report.before,
                "after\n" + report.after if report.after != report.before else "after: the same\n",
            ]
    return "\n".join(parts)


def check_spelling(name: str, report: OverlapReport) -> None:
    """A spelling of a site is found as one site with the expected pattern, dim and role."""
    assert summary(report) == [(*SITES[name], "overlapped")]
    assert report.near_misses == [] and report.notices == []
    collectives = re.compile("_c10d_functional|shard_dim_alltoall")
    assert collectives.search(report.before) and not collectives.search(report.after)


def section(world_size: int, content: str) -> str:
    return f"==== {world_size} ranks\n{content}"


def of_sizes(file: str, sizes: Iterable[int]) -> str:
    """The sections of a golden file for groups of ``sizes`` ranks."""
    return "".join(
        part for part in re.split("(?m)^(?====)", file) if part.startswith(tuple(section(s, "") for s in sizes))
    )


def check_sizes(name: str, sizes: dict[int, tuple[int, ...]], every_rank: bool = False) -> None:
    """Compare the texts of a graph among ranks and, with the golden files' torch version, with its golden file.

    Args:
        sizes: ``{number of ranks: ranks whose texts are made}``
        every_rank: also make the texts that ``make test`` leaves out (``ENDS``).
    """
    if (broken := WITHOUT_OVERLAP_TOO.get(name)) and torch.__version__.startswith(broken):
        pytest.skip(f"torch {broken} fails to trace it for backend eager, too")
    pinned, accepted = torch.__version__.startswith(TORCH), os.environ.get("EXPECTTEST_ACCEPT")
    sections = []
    # A golden file is written for all numbers of ranks at once.
    for world_size, ranks in sorted({**ENDS, **MIDDLES}.items() if accepted else sizes.items()):
        whole = world_size == 2 or name in WHOLE
        one = pinned and not accepted and not every_rank
        of = ranks[:1] if one and world_size == 2 else ranks[-1:] if one and world_size == 8 else ranks
        made = [reports(name, world_size, rank) for rank in of]
        texts = {text(found, whole) for found in made}
        assert len(texts) == 1, f"{world_size} ranks have {len(texts)} texts"
        sections.append(section(world_size, texts.pop()))
        if name in SITES:
            (report,) = made[0]
            check_spelling(name, report)
    if pinned:
        found = "\n".join(sections).rstrip() + "\n"
        check_golden(found, file_of(name), lambda file: of_sizes(file, sizes).rstrip() + "\n")


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(name: str) -> None:
    """Any change of the sites, decisions, graphs and reports fails this test."""
    check_sizes(name, {**ENDS, **MIDDLES} if name in WHOLE else ENDS)


@pytest.mark.thorough
@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"golden files are for torch {TORCH}")
@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in WHOLE])
def test_golden_of_other_sizes(name: str) -> None:
    check_sizes(name, MIDDLES)


@pytest.mark.thorough
@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"golden files are for torch {TORCH}")
@pytest.mark.parametrize("name", GRAPHS)
def test_golden_of_the_first_and_the_last_rank(name: str) -> None:
    check_sizes(name, ENDS, every_rank=True)


def test_no_golden_file_is_left_over() -> None:
    """Each golden file belongs to a graph, or a test names it."""
    files = {str(f.relative_to(FOLDER)) for f in FOLDER.rglob("*.txt")}
    graphs = {file_of(name) for name in GRAPHS} | {sequence_blocks.file_of(name) for name in sequence_blocks.BLOCKS}
    sources = "".join(f.read_text() for f in FOLDER.parent.rglob("test_*.py"))
    named = {f for f in files - graphs if f'"{f}"' in sources}
    assert graphs <= files and files == graphs | named

# SPDX-License-Identifier: Apache-2.0
"""The short form of a report: the text of ``str(report)``, and the rows of a notebook's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.groups import SiteGroup
from overlap_inductor.report.groups import group_sites

if TYPE_CHECKING:
    from overlap_inductor.report.report import OverlapReport

MOST_ROWS = 8


def title(report: OverlapReport) -> str:
    """The first line of the short form.

    Example: ``graph 0_0 forward, 5 sites found: 4 overlapped, 1 refused; 2 near misses``.
    """
    return f"graph {report.graph} {report.phase}, {words.headline(report)}"


def rows(report: OverlapReport) -> tuple[list[SiteGroup], int]:
    """The groups of sites that the short form shows, and the number of groups that it leaves out."""
    groups = group_sites(report)
    return groups[:MOST_ROWS], max(0, len(groups) - MOST_ROWS)


def render_short(report: OverlapReport) -> str:
    """The report in at most ``MOST_ROWS`` + 3 lines, without a newline at the end."""
    lines = [title(report)]
    if estimated := totals.line(report):
        lines.append(f"  {estimated}")
    shown, hidden = rows(report)
    cells = [(group.module, f"{len(group.sites)} x {group.facts.pattern}") for group in shown]
    widths = [max((len(row[column]) for row in cells), default=0) for column in (0, 1)]
    for group, (module, pattern) in zip(shown, cells, strict=True):
        lines.append(f"  {module:<{widths[0]}}  {pattern:<{widths[1]}}  {words.outcome(group.decision)}")
    if hidden:
        lines.append(f"  and {words.count(hidden, 'more row')}; to_text() has all")
    return "\n".join(lines)

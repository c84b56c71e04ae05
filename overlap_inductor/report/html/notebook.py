# SPDX-License-Identifier: Apache-2.0
"""A report as a small HTML fragment for notebooks, in the notebook's own colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_inductor.report import short
from overlap_inductor.report import totals
from overlap_inductor.report.html.environment import render

if TYPE_CHECKING:
    from overlap_inductor.report.report import OverlapReport


def render_compact(report: OverlapReport) -> str:
    shown, hidden = short.rows(report)
    return render("notebook.html", title=short.title(report), total=totals.line(report), groups=shown, hidden=hidden)

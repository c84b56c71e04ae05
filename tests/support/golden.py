# SPDX-License-Identifier: Apache-2.0
"""Expected texts in files of ``tests/golden``. After an intended change, ``EXPECTTEST_ACCEPT=1`` writes them again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from overlap_inductor.report import words
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import ADVICE_TITLE
from overlap_inductor.report.text import render_text

FOLDER = Path(__file__).parents[1] / "golden"
_SWITCHES = re.compile(r"requested and effective\n-+\n(?:.+\n)+\n")
_TOTAL = re.compile(r"^estimated .*\n", re.M)
_ADVICE = re.compile(rf"\n{ADVICE_TITLE}\n-+\n(?:.+\n)+")


def check_golden(found: str, name: str, part: Callable[[str], str] = str) -> None:
    """Fail if ``found`` is not the text of file ``name`` (a path below ``golden/``), or if there is no such file. Of
    both texts, only what ``part`` returns is compared. Versions and plan hashes change with every release, so dots
    replace them."""
    found = _without_versions(found)
    file = FOLDER / name
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found)
    assert part(found) == part(file.read_text()), f"{name} differs; EXPECTTEST_ACCEPT=1 writes it anew"


def report_text(report: OverlapReport) -> str:
    """The report's text without the total of the estimates and the advice, which do not describe the graph. In place of
    the table of switches, one line names the switches whose effective value is not the requested one."""
    effective = [f"{name} {now}" for name, requested, now in words.switches(report) if now != requested]
    text, tables = _SWITCHES.subn(f"effective: {'; '.join(effective)}\n\n", render_text(report))
    assert tables == 1, f"{tables} tables of switches in a report"
    return _ADVICE.sub("", _TOTAL.sub("", text, 1))


def _without_versions(text: str) -> str:
    return re.sub(
        r"plan [0-9a-f]{16}|torch [0-9][\w.+]*|overlap_inductor [0-9][\w.]*", lambda m: m[0].split()[0] + " ...", text
    )

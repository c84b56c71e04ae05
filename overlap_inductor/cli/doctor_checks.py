# SPDX-License-Identifier: Apache-2.0
"""``Check``: one fact that ``overlap-inductor doctor`` found, and how a list of checks is printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_inductor.cli import tables

GOOD, BAD, NOTE = "good", "bad", "note"
_STYLES = {GOOD: "green", BAD: "bold red", NOTE: ""}
_MARKS = {GOOD: "\u2713", BAD: "\u2717", NOTE: "\u00b7"}
_ASCII_MARKS = {GOOD: "+", BAD: "x", NOTE: "-"}


@dataclass(frozen=True)
class Check:
    """One fact.

    Attributes:
        state: ``good``, ``bad`` (something that is required or requested cannot take effect) or ``note``.
        advice: what the user can do; may be empty.
        answer: ``yes``, ``no`` or a number if the check answers a question, else empty. ``value`` explains the answer.
    """

    section: str
    name: str
    state: str
    value: str
    advice: str = ""
    answer: str = ""


def usable(checks: Sequence[Check]) -> bool:
    """Whether everything that is required or requested can take effect."""
    return not any(check.state == BAD for check in checks)


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    return {"usable": usable(checks), "checks": [asdict(check) for check in checks]}


def as_text(checks: Sequence[Check], stream: TextIO | None = None) -> str:
    """The checks in sections, with marks that ``stream`` (by default standard output) can encode, and a verdict."""
    encoding = (stream or sys.stdout).encoding or "ascii"
    marks = _MARKS
    try:
        "".join(_MARKS.values()).encode(encoding)
    except UnicodeEncodeError:
        marks = _ASCII_MARKS
    parts: list[RenderableType] = []
    for section, members in groupby(checks, key=lambda check: check.section):
        parts += [Text(section, "bold"), _section(list(members), marks), ""]
    bad = [check.name for check in checks if check.state == BAD]
    runs = [check.name for check in checks if check.answer == "yes"]
    usable_here = f"Usable. Schedules that run here: {', '.join(runs)}." if runs else "Usable."
    verdict = f"Not usable as asked: {', '.join(bad)}." if bad else usable_here
    return tables.as_text([*parts, Text(verdict, "bold")], stream)


def _section(checks: Sequence[Check], marks: Mapping[str, str]) -> Table:
    """A table with a row for each check: mark, name, answer if the section has answers, and value. The advice stands
    below the value."""
    width = max(len(check.name) for check in checks)
    answers = max(len(check.answer) for check in checks)
    widths: list[int | None] = [4, width + 2, answers + 2, None] if answers else [4, width + 2, None]
    rows = []
    for check in checks:
        style = _STYLES[check.state]
        said = "\n".join(filter(None, [check.value, f"-> {check.advice}" if check.advice else ""]))
        answer = [(check.answer, style)] if answers else []
        rows.append([(f"  {marks[check.state]} ", style), (check.name, ""), *answer, (said, "")])
    return tables.grid(widths, rows)

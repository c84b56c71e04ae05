# SPDX-License-Identifier: Apache-2.0
"""``Check``: one fact that ``overlap-inductor doctor`` found, and how a list of checks is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any
from typing import TextIO

GOOD, BAD, NOTE = "good", "bad", "note"
_MARKS = {GOOD: "\u2713", BAD: "\u2717", NOTE: "\u00b7"}
_ASCII_MARKS = {GOOD: "+", BAD: "x", NOTE: "-"}


@dataclass(frozen=True)
class Check:
    """One fact. ``state``: ``good``; ``bad`` (something needed or asked for cannot take effect); ``note`` (absent, and
    not needed).

    ``advice`` is one sentence that says what to do; empty if there is nothing to do.
    """

    section: str
    name: str
    state: str
    value: str
    advice: str = ""


def usable(checks: Sequence[Check]) -> bool:
    """Whether all that is needed and asked for can take effect."""
    return not any(check.state == BAD for check in checks)


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks for ``--json``."""
    return {"usable": usable(checks), "checks": [asdict(check) for check in checks]}


def as_text(checks: Sequence[Check], stream: TextIO | None = None) -> str:
    """The checks in sections, with marks that ``stream`` (by default standard output) can encode, and a verdict."""
    encoding = (stream or sys.stdout).encoding or "ascii"
    marks = _MARKS
    try:
        "".join(_MARKS.values()).encode(encoding)
    except UnicodeEncodeError:
        marks = _ASCII_MARKS
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    section = None
    for check in checks:
        if check.section != section:
            lines += ["", check.section] if section is not None else [check.section]
            section = check.section
        first, *rest = check.value.splitlines() or [""]
        lines.append(f"  {marks[check.state]} {check.name.ljust(width)}  {first}".rstrip())
        lines += [f"    {' ' * width}  {line}" for line in rest]
        if check.advice:
            lines.append(f"    {' ' * width}  -> {check.advice}")
    bad = [check.name for check in checks if check.state == BAD]
    verdict = f"Not usable as asked: {', '.join(bad)}." if bad else "Usable."
    return "\n".join([*lines, "", verdict]) + "\n"

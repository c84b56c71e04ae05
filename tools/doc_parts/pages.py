# SPDX-License-Identifier: Apache-2.0
"""Generated parts of a page: the lines between ``<!-- made: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_PART = re.compile(r"(?<=<!-- made: )([\w.-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with every generated part made anew.

    Args:
        parts: what makes a part, by its name.

    Raises:
        KeyError: the page names a part that nothing makes.
        ValueError: a part has no end.
    """
    if text.count("<!-- made: ") != text.count("<!-- end -->"):
        raise ValueError("each '<!-- made: NAME -->' needs one '<!-- end -->'")
    return _PART.sub(lambda match: f"{match[1]}{match[2]}\n{parts[match[1]]().strip()}\n\n", text)


def names(text: str) -> list[str]:
    """The names of the generated parts of ``text``."""
    return [match[1] for match in _PART.finditer(text)]


def pages() -> list[Path]:
    """Every page of ``docs/``, in the order of their names."""
    return sorted(DOCS.glob("*.md"))

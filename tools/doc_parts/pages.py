# SPDX-License-Identifier: Apache-2.0
"""Finds and replaces the generated parts of README and of the pages in ``docs/``.

A generated part is the lines between ``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_PART = re.compile(r"(?<=<!-- made: )([\w.-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A page's ``text`` with every generated part generated again.

    Args:
        parts: for the name of each part, a function that returns its text.

    Raises:
        KeyError: the page names a part that is not in ``parts``.
        ValueError: the page has more starts of parts than ends, or fewer.
    """
    if text.count("<!-- made: ") != text.count("<!-- end -->"):
        raise ValueError("each '<!-- made: NAME -->' needs one '<!-- end -->'; the numbers of the two differ")
    return _PART.sub(lambda match: f"{match[1]}{match[2]}\n{parts[match[1]]().strip()}\n\n", text)


def names(text: str) -> list[str]:
    return [match[1] for match in _PART.finditer(text)]


def pages() -> list[Path]:
    return sorted(DOCS.glob("*.md"))

# SPDX-License-Identifier: Apache-2.0
"""Fails if a file of ``sources`` does not begin with the licence's SPDX line, which may follow a ``#!`` line. ``--fix``
writes missing SPDX lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
FOLDERS = ("overlap_inductor", "tests", "bench", "tools", "examples", ".github")
SUFFIXES = (".py", ".yml")
SINGLE = (".ci/run", "Makefile", "MANIFEST.in", "pyproject.toml")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    yield from (ROOT / name for name in SINGLE)


def with_header(text: str) -> str:
    """``text`` with the SPDX line at its beginning, or after its ``#!`` line."""
    first, rest = ("", text)
    if text.startswith("#!"):
        first, newline, rest = text.partition("\n")
        first += newline
    return text if rest.startswith(HEADER) else f"{first}{HEADER}{rest}"


def main(arguments: list[str]) -> int:
    lacking = [path for path in sources() if with_header(path.read_text()) != path.read_text()]
    for path in lacking:
        if arguments == ["--fix"]:
            path.write_text(with_header(path.read_text()))
        else:
            print(
                f"{path.relative_to(ROOT)}:1: does not begin with {HEADER.strip()!r}; run: python {sys.argv[0]} --fix"
            )
    return int(bool(lacking) and arguments != ["--fix"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Tables of the command line, made by ``rich``. On a terminal, tables fit its width. Elsewhere, tables are plain text,
and no line is cut or wrapped."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_UNCUT = 1_000_000


def as_text(parts: Iterable[RenderableType], stream: TextIO | None = None) -> str:
    """``parts``, one below the other, as text for ``stream`` (by default standard output)."""
    terminal = (stream or sys.stdout).isatty()
    out = io.StringIO()
    if terminal:
        console = Console(file=out, force_terminal=True, highlight=False)
    else:
        # With a color_system other than None, rich would also color text for a pipe if FORCE_COLOR is set.
        console = Console(file=out, force_terminal=False, color_system=None, width=_UNCUT, highlight=False)
    console.print(*parts, sep="\n")
    return out.getvalue() if terminal else "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def grid(widths: Sequence[int | None], rows: Iterable[Sequence[tuple[str, str]]]) -> Table:
    """A table without a head or lines. ``rows`` hold cells ``(text, style)``. ``widths``: each column's minimum
    width. A column with ``None`` has no minimum. On a terminal, its long texts are wrapped."""
    table = Table.grid()
    for width in widths:
        table.add_column(min_width=width, no_wrap=width is not None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style) for text, style in row))
    return table


def headed(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """A table with a head and no lines. The columns ``right`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table

"""Show two graphs as one page section: changed lines marked, unchanged runs folded. Usable for thousands of lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

CONTEXT = 3
"""Unchanged lines that are shown beside a change. All others are folded."""


@dataclass(frozen=True)
class Line:
    """One line of the merged view. ``kind``: same | del | ins. Line numbers count from 1; ``None`` if the line is
    absent there."""

    kind: str
    text: str
    before: int | None
    after: int | None


def merge(before: str, after: str) -> list[Line]:
    """Both graphs as one list of lines. Unchanged lines appear once."""
    old, new = before.splitlines(), after.splitlines()
    lines: list[Line] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [Line("same", new[j + n], i + n + 1, j + n + 1) for n in range(j_end - j)]
            continue
        lines += [Line("del", old[n], n + 1, None) for n in range(i, i_end)]
        lines += [Line("ins", new[n], None, n + 1) for n in range(j, j_end)]
    return lines


def render_diff(before: str, after: str, anchors: Mapping[str, str]) -> str:
    """The merged view as HTML. ``anchors`` maps a text (a site's id) to the HTML ``id`` that the first line with that
    text gets."""
    lines = merge(before, after)
    if not lines:
        return '<p class="quiet">No graph was kept: it holds no site and no near miss.</p>'
    removed, added = sum(x.kind == "del" for x in lines), sum(x.kind == "ins" for x in lines)
    if not removed and not added:
        head = f"The graph is unchanged ({len(lines)} lines)."
    else:
        head = f"{removed} lines removed, {added} added, {len(lines) - removed - added} unchanged and folded."
    open_anchors = dict(anchors)
    blocks = "".join(_block(block, open_anchors) for block in _fold(lines))
    buttons = (
        '<p class="script-only"><button type="button" data-step="-1">previous change</button>'
        '<button type="button" data-step="1">next change</button></p>'
    )
    return (
        f'<p class="quiet">{head}</p>{buttons if removed or added else ""}<div class="diff" tabindex="0">{blocks}</div>'
    )


def _fold(lines: list[Line]) -> Iterator[tuple[bool, list[Line]]]:
    """Runs of lines, each as (whether it is folded, its lines)."""
    shown = [False] * len(lines)
    for index, line in enumerate(lines):
        if line.kind != "same":
            for near in range(max(0, index - CONTEXT), min(len(lines), index + CONTEXT + 1)):
                shown[near] = True
    start = 0
    for index in range(1, len(lines) + 1):
        if index == len(lines) or shown[index] != shown[start]:
            yield not shown[start], lines[start:index]
            start = index


def _block(block: tuple[bool, list[Line]], anchors: dict[str, str]) -> str:
    folded, lines = block
    body = "".join(_changes(lines, anchors))
    if not folded:
        return body
    number = len(lines)
    return f"<details><summary>{number} unchanged line{'s' * (number != 1)}</summary>{body}</details>"


def _changes(lines: Iterable[Line], anchors: dict[str, str]) -> Iterator[str]:
    previous = "same"
    for line in lines:
        first = ' data-change="1"' if line.kind != "same" and previous == "same" else ""
        previous = line.kind
        found = [text for text in anchors if text in line.text]
        target = f' id="{escape(anchors[found[0]])}"' if found else ""
        extra = "".join(f'<a id="{escape(anchors[text])}"></a>' for text in found[1:])
        for text in found:
            del anchors[text]
        tag = {"del": "del", "ins": "ins"}.get(line.kind, "span")
        numbers = f"<b>{line.before or ''}</b><b>{line.after or ''}</b>"
        yield f'<{tag} class="l"{target}{first}>{numbers}<code>{extra}{escape(line.text)}</code></{tag}>'

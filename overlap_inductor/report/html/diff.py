# SPDX-License-Identifier: Apache-2.0
"""Merges two graphs into one list of lines. Changed lines are marked, and runs of unchanged lines are folded."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

CONTEXT = 3
"""How many unchanged lines are shown on each side of a change. All other unchanged lines are folded."""


@dataclass(frozen=True)
class Line:
    """One line of the merged view.

    Attributes:
        kind: same | del | ins.
        before / after: the line's number in each graph, from 1 on, or ``None``.
        first: whether a run of changed lines begins here.
        anchors: HTML ids of this line.
    """

    kind: str
    text: str
    before: int | None
    after: int | None
    first: bool = False
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diff:
    """``blocks``: runs of lines, each as (whether it is folded, its lines)."""

    removed: int
    added: int
    same: int
    blocks: tuple[tuple[bool, tuple[Line, ...]], ...]

    @property
    def folded(self) -> int:
        return sum(len(lines) for folded, lines in self.blocks if folded)


def merge(before: str, after: str) -> list[Line]:
    """Both graphs as one list of lines. Unchanged lines appear once."""
    old, new = before.splitlines(), after.splitlines()
    lines: list[Line] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [Line("same", new[j + n], i + n + 1, j + n + 1) for n in range(j_end - j)]
            continue
        changed = [Line("del", old[n], n + 1, None) for n in range(i, i_end)]
        changed += [Line("ins", new[n], None, n + 1) for n in range(j, j_end)]
        lines += [replace(changed[0], first=True), *changed[1:]]
    return lines


def diff(before: str, after: str, anchors: Mapping[str, str]) -> Diff:
    """The merged view. ``anchors``: ``{site's id: HTML id}``. The first line that contains a site's id gets the HTML
    id."""
    lines = _anchored(merge(before, after), anchors)
    removed, added = sum(x.kind == "del" for x in lines), sum(x.kind == "ins" for x in lines)
    return Diff(removed, added, len(lines) - removed - added, tuple(_fold(lines)))


def _anchored(lines: list[Line], anchors: Mapping[str, str]) -> list[Line]:
    left = dict(anchors)
    found = []
    for line in lines:
        texts = [text for text in left if text in line.text]
        found.append(replace(line, anchors=tuple(left.pop(text) for text in texts)) if texts else line)
    return found


def _fold(lines: list[Line]) -> Iterator[tuple[bool, tuple[Line, ...]]]:
    shown = [False] * len(lines)
    for index, line in enumerate(lines):
        if line.kind != "same":
            for near in range(max(0, index - CONTEXT), min(len(lines), index + CONTEXT + 1)):
                shown[near] = True
    start = 0
    for index in range(1, len(lines) + 1):
        if index == len(lines) or shown[index] != shown[start]:
            yield not shown[start], tuple(lines[start:index])
            start = index

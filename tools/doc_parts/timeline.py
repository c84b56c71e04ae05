# SPDX-License-Identifier: Apache-2.0
"""Draws work over time: lanes of boxes, as SVG that takes the colours of the page.

A box starts when its lane is free and all boxes on which it depends have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from xml.sax.saxutils import escape

MATMUL, TRANSFER, OTHER = "matmul", "transfer", "other"
LANE, LEFT, UNIT, TOP, BOX = 38, 150, 26.0, 24, 26
"""Sizes in pixels. ``LANE``: height of a lane. ``LEFT``: width of the column of lane names. ``UNIT``: width of one unit
of time. ``TOP``: space above the first lane. ``BOX``: height of a box."""


@dataclass(frozen=True)
class Box:
    """Work from ``start`` to ``end`` (units of time). ``kind``: matmul | transfer | other."""

    lane: str
    label: str
    kind: str
    start: float
    end: float
    after: tuple[Box, ...] = ()


@dataclass
class Timeline:
    """Lanes of boxes, from top to bottom in the order of ``lanes``."""

    title: str
    lanes: Sequence[str]
    boxes: list[Box] = field(default_factory=list)

    def add(self, lane: str, label: str, length: float, kind: str = MATMUL, after: Iterable[Box] = ()) -> Box:
        """Add a box as early as its lane and ``after`` allow.

        Raises:
            ValueError: there is no such lane.
        """
        if lane not in self.lanes:
            raise ValueError(f"no lane {lane!r}; expected one of: {', '.join(self.lanes)}")
        waits = tuple(after)
        start = max([b.end for b in self.boxes if b.lane == lane] + [b.end for b in waits], default=0.0)
        self.boxes.append(Box(lane, label, kind, start, start + length, waits))
        return self.boxes[-1]

    @property
    def end(self) -> float:
        return max(box.end for box in self.boxes)

    def exposed(self) -> list[tuple[Box, float, float]]:
        """The parts of transfers during which no matmul runs, as ``(transfer, start, end)``."""
        busy = sorted((b.start, b.end) for b in self.boxes if b.kind == MATMUL)
        found = []
        for box in self.boxes:
            position = box.start
            for start, end in [*busy, (float("inf"), float("inf"))] if box.kind == TRANSFER else []:
                if min(start, box.end) - position > 1e-6:
                    found.append((box, position, min(start, box.end)))
                position = max(position, end)
        return found


def svg(timelines: Sequence[Timeline], description: str) -> str:
    """Draw the timelines below each other, on one scale, each with a mark at its end. A screen reader reads
    ``description``."""
    width = LEFT + UNIT * max(t.end for t in timelines) + 70
    parts, y = [], 0.0
    for timeline in timelines:
        parts.append(_drawn(timeline, y, width))
        y += TOP + LANE * len(timeline.lanes) + 14
    head = f'<svg viewBox="0 0 {width:.0f} {y:.0f}" role="img" aria-label="{escape(description)}">'
    # The output is one line, because Markdown would end the block at an empty line.
    return f'<div class="timeline" style="--width: {width:.0f}px">{head}{"".join(parts)}</svg></div>'


def _drawn(timeline: Timeline, y: float, width: float) -> str:
    parts = [f'<text class="title" x="0" y="{y + 15:.0f}">{escape(timeline.title)}</text>']
    for i, lane in enumerate(timeline.lanes):
        top = y + TOP + i * LANE
        parts.append(f'<text class="lane" x="0" y="{top + 23:.0f}">{escape(lane)}</text>')
        parts.append(f'<line class="rail" x1="{LEFT}" x2="{width:.0f}" y1="{top + 32:.0f}" y2="{top + 32:.0f}"/>')
        for box in (b for b in timeline.boxes if b.lane == lane):
            middle = _x((box.start + box.end) / 2)
            parts.append(_rectangle(box.kind, box.start, box.end, top))
            parts.append(f'<text class="label" x="{middle:.1f}" y="{top + 23:.0f}">{escape(box.label)}</text>')
        for box, start, end in timeline.exposed():
            if box.lane == lane:
                parts.append(_rectangle("exposed", start, end, top))
    end, bottom = _x(timeline.end), y + TOP + LANE * len(timeline.lanes)
    parts.append(f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{y + TOP:.0f}" y2="{bottom:.0f}"/>')
    parts.append(f'<text class="lane" x="{end + 5:.1f}" y="{y + TOP + 10:.0f}">{timeline.end:.1f}</text>')
    return "".join(parts)


def _rectangle(kind: str, start: float, end: float, top: float) -> str:
    width = (end - start) * UNIT - 1
    return f'<rect class="{kind}" x="{_x(start):.1f}" y="{top + 5:.0f}" width="{width:.1f}" height="{BOX}"/>'


def _x(time: float) -> float:
    return LEFT + time * UNIT

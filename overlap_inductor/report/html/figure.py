# SPDX-License-Identifier: Apache-2.0
"""Place the bars of a sketch (two timelines of one site) on a page, in per cent of the axis. Add ticks, totals and
notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.html.timeline import Row
from overlap_inductor.report.html.timeline import Sketch
from overlap_inductor.report.html.timeline import sketch

if TYPE_CHECKING:
    from overlap_inductor.report.groups import SiteGroup

MOST_FIGURES = 12
_TICKS = 7
_ROOM = 1.04
"""Length of the axis, relative to the longest row."""


@dataclass(frozen=True)
class Placed:
    """A bar: ``left`` and ``width`` in per cent of the axis."""

    kind: str
    left: float
    width: float
    label: str


@dataclass(frozen=True)
class PlacedRow:
    """A timeline of ``lanes``, each a name and its bars. ``verdict``: a box for the saved or lost time, or ``None``."""

    title: str
    total: str
    detail: str
    lanes: tuple[tuple[str, tuple[Placed, ...]], ...]
    verdict: Placed | None


@dataclass(frozen=True)
class Figure:
    """One sketch.

    Attributes:
        ticks: (position in per cent, text); empty if nothing was estimated.
        times: the time as written and the time by the plan, as a text.
        tone: by the estimate, the plan is faster (``good``) or slower (``bad``) than the site as written. ``wait``: the
            times are equal, or nothing was estimated.
    """

    title: str
    modules: tuple[str, ...]
    rows: tuple[PlacedRow, PlacedRow]
    ticks: tuple[tuple[float, str], ...]
    unit: str
    times: str
    tone: str
    notes: tuple[str, ...]


def figures(groups: Sequence[SiteGroup]) -> tuple[list[Figure], int]:
    """``(figures, number left out)``: a figure for each group of like sites and each piece of the group's plan that is
    not ``keep``. Equal figures are drawn once."""
    alike: dict[str, list[tuple[SiteGroup, PlanPiece]]] = {}
    for group in groups:
        for piece in group.decision.plan:
            if piece.schedule != "keep":
                collective = group.facts.collective
                key = repr((group.facts.pattern, collective.kind, collective.world_size, piece))
                alike.setdefault(key, []).append((group, piece))
    drawn = list(alike.values())
    return [
        figure(members[0][0], members[0][1], tuple(dict.fromkeys(group.module for group, _ in members)))
        for members in drawn[:MOST_FIGURES]
    ], max(0, len(drawn) - MOST_FIGURES)


def figure(group: SiteGroup, piece: PlanPiece, modules: tuple[str, ...]) -> Figure:
    """The sketch of a group's sites under a piece of their plan that is not ``keep``."""
    drawing = sketch(group.facts, piece)
    length = drawing.length * _ROOM
    times = totals.of_piece(piece) if drawing.estimated else None
    several = f", tokens {words.tokens(piece)}" if len(group.decision.plan) > 1 else ""
    notes = []
    if times is None:
        notes.append("This site has no estimate, so matmul and collective are drawn equally long.")
    if drawing.merged_steps:
        notes.append("The sketch has fewer and longer steps than the plan.")
    return Figure(
        title=f"{group.facts.pattern}, {words.schedule(piece)}{several}",
        modules=modules,
        rows=(
            _placed("as written", drawing.written, drawing, length),
            _placed(words.schedule(piece), drawing.planned, drawing, length, _verdict(times, length)),
        ),
        ticks=tuple(_ticks(length, _unit(drawing.length))) if times else (),
        unit=_unit(drawing.length),
        times=f"estimated {times.text('→')}" if times else "no estimate",
        tone="wait" if times is None or times.keep == times.plan else "bad" if times.slower else "good",
        notes=tuple(notes),
    )


def _placed(title: str, row: Row, drawing: Sketch, length: float, verdict: Placed | None = None) -> PlacedRow:
    lanes = []
    for lane in ("matmul", "transfer", "fixed"):
        bars = [
            Placed(
                bar.kind,
                100 * bar.start / length,
                100 * (bar.end - bar.start) / length,
                bar.label
                + (f": {words.microseconds(bar.end - bar.start, drawing.length)}" if drawing.estimated else ""),
            )
            for bar in row.bars
            if bar.lane == lane and bar.end > bar.start
        ]
        if bars or lane != "fixed":
            lanes.append((lane, tuple(bars)))
    parts = [("exposed", row.exposed), ("fixed", row.fixed)] if drawing.estimated else []
    longest = drawing.length
    detail = ", ".join(f"{name} {words.microseconds(value, longest)}" for name, value in parts if value > 0)
    total = words.microseconds(row.end, longest) if drawing.estimated else ""
    return PlacedRow(title, total, detail, tuple(lanes), verdict)


def _verdict(times: totals.Times | None, length: float) -> Placed | None:
    if times is None or times.keep == times.plan:
        return None
    first, last = sorted((times.keep, times.plan))
    text = f"{words.microseconds(last - first, last)} {'slower' if times.slower else 'saved'}"
    return Placed("slower" if times.slower else "saved", 100 * first / length, 100 * (last - first) / length, text)


def _unit(longest: float) -> str:
    """The unit in which ``words.microseconds`` gives the longest time of a figure."""
    return words.microseconds(longest).split()[1]


def _ticks(length: float, unit: str) -> list[tuple[float, str]]:
    """About ``_TICKS`` round numbers of ``unit`` from 0 up to ``length`` microseconds."""
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}[unit]
    rough = length / scale / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [(100 * i * step * scale / length, f"{i * step:g}") for i in range(math.floor(length / scale / step) + 1)]

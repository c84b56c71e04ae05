"""Sketch the timeline of one site with schedule ``ring`` on one rank, from estimates: the original order and the
overlapped one.

The lengths come from ``estimate_us`` (``matmul`` and ``collective`` alone), the steps from the plan's sub-chunks and
the world size. Without an estimate both are drawn equally long. The sketch shows why time is saved, not how much was.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.report import words
from overlap_inductor.report.report import SiteReport

MOST_STEPS = 64
_WIDTH, _LEFT, _LANE, _GAP = 1240, 90, 26, 6


@dataclass(frozen=True)
class Bar:
    """A piece of work on a lane. ``start``, ``end``: microseconds, or halves of the serial time if nothing was
    estimated."""

    lane: str
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Sketch:
    serial: tuple[Bar, ...]
    overlapped: tuple[Bar, ...]
    estimated: bool
    merged_steps: bool

    @property
    def length(self) -> float:
        return max(bar.end for bar in (*self.serial, *self.overlapped))


def sketch(site: SiteReport, piece: PlanPiece) -> Sketch:
    """The two timelines of a site under a plan piece."""
    estimated = all(piece.estimate_us.get(name, 0.0) > 0 for name in words.PARTS)
    matmul, collective = (piece.estimate_us[name] if estimated else 1.0 for name in words.PARTS)
    world_size = site.facts.collective.world_size
    parts = int(piece.parameters.get("sub_chunks", 1))
    pattern = site.facts.pattern
    slices = 1 if pattern == "matmul_all_gather" else min(world_size, MOST_STEPS)
    drawn = max(1, min(parts, MOST_STEPS // slices))
    first, second = ("collective", "matmul") if pattern.startswith("all_gather") else ("matmul", "collective")
    lengths = {"matmul": matmul, "collective": collective}
    lanes = {"matmul": "matmul", "collective": "transfer"}
    serial = (
        Bar(lanes[first], 0.0, lengths[first], first),
        Bar(lanes[second], lengths[first], matmul + collective, second),
    )
    if pattern == "matmul_all_gather":
        overlapped = _after_each(matmul, collective, drawn)
    elif pattern.startswith("all_gather"):
        overlapped = _gather(matmul, collective, slices, drawn)
    else:
        legs = 2 if pattern == "matmul_all_reduce" else 1
        overlapped = _reduce(matmul, collective, slices, drawn, legs)
    return Sketch(serial, tuple(overlapped), estimated, drawn != parts or slices not in (1, world_size))


def _gather(matmul: float, collective: float, world_size: int, parts: int) -> list[Bar]:
    """Gather, then matmul: the own shard is multiplied while the others arrive, and a sub-chunk once it has arrived."""
    hops = (world_size - 1) * parts
    hop, step = collective / hops, matmul / (world_size * parts)
    bars = [Bar("transfer", i * hop, (i + 1) * hop, f"arrives {i + 1}/{hops}") for i in range(hops)]
    now = step * parts
    bars.append(Bar("matmul", 0.0, now, "own shard"))
    for i in range(hops):
        begin = max(now, (i + 1) * hop)
        now = begin + step
        bars.append(Bar("matmul", begin, now, f"sub-chunk {i + 1}/{hops}"))
    return bars


def _reduce(matmul: float, collective: float, world_size: int, parts: int, legs: int) -> list[Bar]:
    """Matmul, then reduce: the others' slices come first, and each is sent while the next is multiplied. All-reduce
    (``legs`` 2): in bands; a band's sums go to all ranks while the next band is multiplied."""
    step = matmul / (world_size * parts)
    hop = collective / (legs * (world_size - 1) * parts)
    bars: list[Bar] = []
    now = free = 0.0
    if legs == 2:
        for band in range(parts):
            for slice_ in range(world_size):
                own = slice_ == world_size - 1
                bars.append(
                    Bar("matmul", now, now + step, f"band {band + 1}, {'own slice' if own else f'slice {slice_ + 1}'}")
                )
                now += step
                if not own:
                    free = max(free, now) + hop
                    bars.append(
                        Bar("transfer", free - hop, free, f"band {band + 1}, partial {slice_ + 1} to its owner")
                    )
            begin = max(free, now)
            free = begin + hop * (world_size - 1)
            bars.append(Bar("transfer", begin, free, f"band {band + 1}, sum to all"))
        return bars
    hops = (world_size - 1) * parts
    for i in range(hops):
        bars.append(Bar("matmul", now, now + step, f"slice {i + 1}/{hops}"))
        now += step
        free = max(free, now) + hop
        bars.append(Bar("transfer", free - hop, free, f"partial {i + 1}/{hops} to its owner"))
    bars.append(Bar("matmul", now, now + step * parts, "own slice"))
    return bars


def _after_each(matmul: float, collective: float, parts: int) -> list[Bar]:
    """Matmul, then all-gather: a band of the output is sent while the next is multiplied."""
    bars: list[Bar] = []
    now = free = 0.0
    for i in range(parts):
        bars.append(Bar("matmul", now, now + matmul / parts, f"band {i + 1}"))
        now += matmul / parts
        free = max(free, now) + collective / parts
        bars.append(Bar("transfer", free - collective / parts, free, f"band {i + 1} to all"))
    return bars


def render_sketch(module: str, site: SiteReport, piece: PlanPiece) -> str:
    """The sketch of a site as a ``<figure>`` with an inline SVG and a caption that states the sketch's limits."""
    drawing = sketch(site, piece)
    scale = (_WIDTH - _LEFT - 8) / drawing.length
    rows, top = [], 0
    for title, bars in (("one after the other", drawing.serial), ("overlapped", drawing.overlapped)):
        end = max(bar.end for bar in bars)
        rows.append(f'<text class="head" x="0" y="{top + 14}">{title}</text>')
        top += 22
        begin = top
        for lane in ("matmul", "transfer"):
            rows.append(f'<text x="0" y="{top + 17}">{lane}</text>')
            rows.append(f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 8}" height="{_LANE}"/>')
            rows += [_rect(bar, top, scale, drawing.estimated) for bar in bars if bar.lane == lane]
            top += _LANE + _GAP
        if end < drawing.length:
            x, height = _LEFT + end * scale, 2 * _LANE + _GAP
            rows.append(
                f'<rect class="saved" x="{x:.2f}" y="{begin}" width="{(drawing.length - end) * scale:.2f}"'
                f' height="{height}"/>'
            )
        top += 10
    notes = ["Sketch, from estimates: one rank; the fixed costs of the steps are not drawn."]
    if not drawing.estimated:
        notes.append("Nothing was estimated for this site: matmul and collective are drawn equally long.")
    if drawing.merged_steps:
        notes.append("Drawn with fewer and longer steps than the plan has.")
    title = f"{site.facts.pattern}: {module}, {words.schedule(piece)}"
    if estimated := words.estimates(piece):
        notes.append(f"The plan's estimate, fixed costs included: {estimated}.")
    return (
        f"<figure><figcaption><b>{escape(title)}</b><br><span"
        f' class="quiet">{escape(" ".join(notes))}</span></figcaption><svg viewBox="0 0 {_WIDTH} {top}" role="img"'
        f' aria-label="{escape("timeline sketch of " + title)}">{"".join(rows)}</svg></figure>'
    )


def _rect(bar: Bar, top: float, scale: float, estimated: bool) -> str:
    x, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    inset = 0.5 if width > 3 else 0.0
    took = f": {words.microseconds(bar.end - bar.start)}" if estimated else ""
    return (
        f'<rect class="{bar.lane}" x="{x + inset:.2f}" y="{top + 2}" width="{max(width - 2 * inset, 0.3):.2f}" '
        f'height="{_LANE - 4}" rx="2"><title>{escape(bar.label + took)}</title></rect>'
    )

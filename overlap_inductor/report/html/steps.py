# SPDX-License-Identifier: Apache-2.0
"""Lays out the bars of a timeline. Each function from ``behind`` to ``bands`` draws one way to run a matmul and a
transfer. The arguments are:

- ``matmul``, ``transfer``: microseconds of each as a whole, or 1 each without an estimate.
- ``world_size``: number of ranks, at least 2.
- ``parts``: number of sub-chunks of a shard, or of bands of a result, at least 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace


@dataclass(frozen=True)
class Bar:
    """One box of a timeline.

    Attributes:
        kind: ``matmul``, ``transfer`` or ``fixed`` (fixed costs). ``with_exposed`` cuts each ``transfer`` into
            ``hidden`` and ``exposed``.
        start / end: in the unit of ``matmul`` and ``transfer``.
        label: the box's tooltip.
    """

    kind: str
    start: float
    end: float
    label: str

    @property
    def lane(self) -> str:
        """The lane of the timeline in which the bar is drawn: ``matmul``, ``transfer`` or ``fixed``."""
        return "transfer" if self.kind in ("hidden", "exposed") else self.kind


def end(bars: Iterable[Bar]) -> float:
    """The time at which the last of ``bars`` ends."""
    return max(bar.end for bar in bars)


def behind(matmul: float, transfer: float) -> list[Bar]:
    """A matmul, and the whole transfer after it."""
    return [Bar("matmul", 0.0, matmul, "matmul"), Bar("transfer", matmul, matmul + transfer, "transfer")]


def beside(matmul: float, transfer: float) -> list[Bar]:
    """A matmul and, at the same time, the transfer of its result. The transfer does not end before the matmul."""
    last = max(matmul, transfer)
    return [Bar("matmul", 0.0, matmul, "matmul"), Bar("transfer", last - transfer, last, "transfer")]


def together(matmul: float, transfer: float) -> list[Bar]:
    """A matmul and, at the same time, a transfer that neither needs nor moves the matmul's result."""
    return [Bar("matmul", 0.0, matmul, "matmul"), Bar("transfer", 0.0, transfer, "transfer")]


def beside_gather(matmul: float, transfer: float) -> list[Bar]:
    """A gather and, at the same time, the matmul of its rows. The matmul does not end before the gather."""
    last = max(matmul, transfer)
    return [Bar("transfer", 0.0, transfer, "transfer"), Bar("matmul", last - matmul, last, "matmul")]


def gather(matmul: float, transfer: float, world_size: int, parts: int) -> list[Bar]:
    """A site ``gather -> matmul``. The rank's own shard is multiplied while sub-chunks of other shards arrive. Each of
    these sub-chunks is multiplied after it has arrived."""
    hops = (world_size - 1) * parts
    hop, step = transfer / hops, matmul / (world_size * parts)
    bars = [Bar("transfer", i * hop, (i + 1) * hop, f"sub-chunk {i + 1}/{hops} arrives") for i in range(hops)]
    now = step * parts
    bars.append(Bar("matmul", 0.0, now, "own shard"))
    for i in range(hops):
        begin = max(now, (i + 1) * hop)
        now = begin + step
        bars.append(Bar("matmul", begin, now, f"sub-chunk {i + 1}/{hops}"))
    return bars


def reduce(matmul: float, transfer: float, world_size: int, parts: int, what: str) -> list[Bar]:
    """A site ``matmul -> reduce-scatter`` or ``matmul -> all-to-all``. Each slice for another rank is sent while
    the next one is multiplied. ``what``: the label of a transfer, with ``{}`` for its number."""
    hops = (world_size - 1) * parts
    hop, step = transfer / hops, matmul / (world_size * parts)
    bars: list[Bar] = []
    now = free = 0.0
    for i in range(hops):
        bars.append(Bar("matmul", now, now + step, f"slice {i + 1}/{hops}"))
        now += step
        free = max(free, now) + hop
        bars.append(Bar("transfer", free - hop, free, what.format(f"{i + 1}/{hops}")))
    bars.append(Bar("matmul", now, now + step * parts, "own slice"))
    return bars


def reduce_and_give_back(matmul: float, transfer: float, world_size: int, parts: int) -> list[Bar]:
    """A site ``matmul -> all-reduce`` in bands. A band's sum is sent to all ranks while the next band is multiplied."""
    step = matmul / (world_size * parts)
    hop = transfer / (2 * (world_size - 1) * parts)
    bars: list[Bar] = []
    now = free = 0.0
    for band in range(1, parts + 1):
        for piece in range(1, world_size + 1):
            own = piece == world_size
            bars.append(Bar("matmul", now, now + step, f"band {band}, {'own slice' if own else f'slice {piece}'}"))
            now += step
            if not own:
                free = max(free, now) + hop
                bars.append(Bar("transfer", free - hop, free, f"band {band}, partial {piece} to its owner"))
        begin = max(free, now)
        free = begin + hop * (world_size - 1)
        bars.append(Bar("transfer", begin, free, f"band {band}, sum to all ranks"))
    return bars


def bands(matmul: float, transfer: float, parts: int) -> list[Bar]:
    """A site ``matmul -> all-gather``. A band of the result is sent to all ranks while the next band is multiplied."""
    bars: list[Bar] = []
    now = free = 0.0
    for i in range(1, parts + 1):
        bars.append(Bar("matmul", now, now + matmul / parts, f"band {i}"))
        now += matmul / parts
        free = max(free, now) + transfer / parts
        bars.append(Bar("transfer", free - transfer / parts, free, f"band {i} to all ranks"))
    return bars


def with_exposed(bars: Sequence[Bar]) -> list[Bar]:
    """``bars`` with each transfer cut into parts: ``hidden`` while a matmul runs, else ``exposed``."""
    busy = _joined((bar.start, bar.end) for bar in bars if bar.kind == "matmul")
    return [part for bar in bars for part in (_cut(bar, busy) if bar.kind == "transfer" else [bar])]


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of ``spans`` as separate spans, in order."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + 1e-9:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def _cut(bar: Bar, busy: Sequence[tuple[float, float]]) -> Iterator[Bar]:
    """The parts of ``bar`` inside (``hidden``) and outside (``exposed``) the spans of ``busy``."""
    now = bar.start
    for start, stop in busy:
        start, stop = max(start, now), min(stop, bar.end)
        if start < stop:
            if now < start:
                yield replace(bar, kind="exposed", start=now, end=start)
            yield replace(bar, kind="hidden", start=start, end=stop)
            now = stop
    if now < bar.end:
        yield replace(bar, kind="exposed", start=now)

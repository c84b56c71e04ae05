# SPDX-License-Identifier: Apache-2.0
"""Bars of a timeline, for each way in which a matmul and a transfer run beside each other.

Each function takes the microseconds of the whole matmul and of the whole transfer, and returns bars that do both. Bars
of one lane do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace


@dataclass(frozen=True)
class Bar:
    """A piece of work.

    Attributes:
        kind: ``matmul`` | ``transfer`` | ``fixed``; of a transfer that was cut at the matmuls' bars ``hidden`` |
            ``exposed``.
        start / end: microseconds.
    """

    kind: str
    start: float
    end: float
    label: str

    @property
    def lane(self) -> str:
        return "transfer" if self.kind in ("hidden", "exposed") else self.kind


def end(bars: Iterable[Bar]) -> float:
    return max(bar.end for bar in bars)


def behind(matmul: float, transfer: float) -> list[Bar]:
    """Matmul, then transfer."""
    return [Bar("matmul", 0.0, matmul, "matmul"), Bar("transfer", matmul, matmul + transfer, "transfer")]


def beside(matmul: float, transfer: float) -> list[Bar]:
    """A matmul and the transfer of its result, which cannot end before the matmul does."""
    last = max(matmul, transfer)
    return [Bar("matmul", 0.0, matmul, "matmul"), Bar("transfer", last - transfer, last, "transfer")]


def beside_gather(matmul: float, transfer: float) -> list[Bar]:
    """A gather and the matmul of what has come; the matmul cannot end before the gather does."""
    last = max(matmul, transfer)
    return [Bar("transfer", 0.0, transfer, "transfer"), Bar("matmul", last - matmul, last, "matmul")]


def gather(matmul: float, transfer: float, world_size: int, parts: int) -> list[Bar]:
    """Gather, then matmul: the own shard is multiplied while the others arrive, and a sub-chunk once it has arrived."""
    hops = (world_size - 1) * parts
    hop, step = transfer / hops, matmul / (world_size * parts)
    bars = [Bar("transfer", i * hop, (i + 1) * hop, f"arrives {i + 1}/{hops}") for i in range(hops)]
    now = step * parts
    bars.append(Bar("matmul", 0.0, now, "own shard"))
    for i in range(hops):
        begin = max(now, (i + 1) * hop)
        now = begin + step
        bars.append(Bar("matmul", begin, now, f"sub-chunk {i + 1}/{hops}"))
    return bars


def reduce(matmul: float, transfer: float, world_size: int, parts: int) -> list[Bar]:
    """Matmul, then reduce: the others' slices come first, and each is sent while the next is multiplied."""
    hops = (world_size - 1) * parts
    hop, step = transfer / hops, matmul / (world_size * parts)
    bars: list[Bar] = []
    now = free = 0.0
    for i in range(hops):
        bars.append(Bar("matmul", now, now + step, f"slice {i + 1}/{hops}"))
        now += step
        free = max(free, now) + hop
        bars.append(Bar("transfer", free - hop, free, f"partial {i + 1}/{hops} to its owner"))
    bars.append(Bar("matmul", now, now + step * parts, "own slice"))
    return bars


def reduce_and_give_back(matmul: float, transfer: float, world_size: int, parts: int) -> list[Bar]:
    """Matmul, then all-reduce, in bands: a band's sums go to all ranks while the next band is multiplied."""
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
        bars.append(Bar("transfer", begin, free, f"band {band}, sum to all"))
    return bars


def bands(matmul: float, transfer: float, parts: int) -> list[Bar]:
    """Matmul, then all-gather: a band of the output is sent while the next is multiplied."""
    bars: list[Bar] = []
    now = free = 0.0
    for i in range(1, parts + 1):
        bars.append(Bar("matmul", now, now + matmul / parts, f"band {i}"))
        now += matmul / parts
        free = max(free, now) + transfer / parts
        bars.append(Bar("transfer", free - transfer / parts, free, f"band {i} to all"))
    return bars


def with_exposed(bars: Sequence[Bar]) -> list[Bar]:
    """``bars`` with each transfer cut into the parts that have a matmul beside them (``hidden``) and the others."""
    busy = _joined((bar.start, bar.end) for bar in bars if bar.kind == "matmul")
    return [part for bar in bars for part in (_cut(bar, busy) if bar.kind == "transfer" else [bar])]


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + 1e-9:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def _cut(bar: Bar, busy: Sequence[tuple[float, float]]) -> Iterator[Bar]:
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

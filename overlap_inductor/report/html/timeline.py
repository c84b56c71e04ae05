# SPDX-License-Identifier: Apache-2.0
"""Sketch two timelines of one site on one rank: of the site as written, and of the site as planned. Lengths come from
the plan's estimates.

The steps follow a simple model:

- If a piece of the plan does not overlap (``PlanPiece.overlaps``), the transfer runs after the matmul.
- If a piece has parameter ``route`` (``transports.routes``), sub-chunks or bands move one after the other.
- If a pattern's name starts with ``attention``, attention and transfer start together.
- For any other piece, matmul and transfer run at the same time. A transfer of the matmul's result ends with or after
  the matmul. A matmul of the gathered tensor ends with or after the transfer.

The timeline of the site as planned ends at the estimate of the plan's schedule. If the steps end earlier, the rest is
drawn as fixed costs: launches, credits, waits and mutual slowdown. If the steps end later, the transfer is shortened,
because the schedule's own transfer is faster than the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING

from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.report.html import steps
from overlap_inductor.report.html.steps import Bar

if TYPE_CHECKING:
    from overlap_inductor.facts.site import SiteFacts

MOST_STEPS = 64
_SHARDS_TRAVEL = ("ring", "bidirectional")
_HALVINGS = 40


@dataclass(frozen=True)
class Row:
    """One timeline. ``end``: the time at which the last bar ends."""

    bars: tuple[Bar, ...]
    end: float

    @property
    def exposed(self) -> float:
        """Microseconds of transfers during which no matmul runs."""
        return sum(bar.end - bar.start for bar in self.bars if bar.kind == "exposed")

    @property
    def fixed(self) -> float:
        return sum(bar.end - bar.start for bar in self.bars if bar.kind == "fixed")


@dataclass(frozen=True)
class Sketch:
    """Two timelines of one site. Without ``estimated``, matmul and collective are 1 each. ``merged_steps``: whether
    fewer steps are drawn than the plan has."""

    written: Row
    planned: Row
    estimated: bool
    merged_steps: bool

    @property
    def length(self) -> float:
        return max(self.written.end, self.planned.end)


def sketch(facts: SiteFacts, piece: PlanPiece) -> Sketch:
    """The two timelines of a site under a piece of its plan that is not ``keep``."""
    estimate = piece.estimate_us
    estimated = {"keep", "matmul", "collective", piece.schedule} <= estimate.keys() and estimate["keep"] > 0
    matmul, collective = (estimate["matmul"], estimate["collective"]) if estimated else (1.0, 1.0)
    shape, merged = _shape(facts, piece)
    keep = estimate["keep"] if estimated else matmul + collective
    written = _in_turn(_gathers_first(facts, piece), matmul, keep)
    total = estimate[piece.schedule] if estimated else steps.end(shape(matmul, collective))
    planned = _fitted(shape, matmul, collective, total)
    return Sketch(Row(tuple(written), keep), Row(tuple(steps.with_exposed(planned)), total), estimated, merged)


def _gathers_first(facts: SiteFacts, piece: PlanPiece) -> bool:
    """Whether the collective runs before the matmul. A pattern's name lists them in the order in which they run. The
    backward of ``embedding_all_to_all`` is an exception: its collective runs first."""
    if "route" in piece.parameters:
        arrives = (
            facts.pattern in ("all_to_all_matmul", "all_gather_matmul", "all_to_all_experts")
            or facts.matmuls[0].kind == "embedding_gradient"
        )
        return piece.parameters["route"] in _SHARDS_TRAVEL or arrives
    if facts.pattern == "embedding_all_to_all":
        return facts.matmuls[0].kind == "embedding_gradient"
    return not facts.collective.reduce_op and not facts.pattern.startswith(("matmul", "attention"))


def _in_turn(gathers_first: bool, matmul: float, keep: float) -> list[Bar]:
    """Collective and matmul, one after the other. The collective's bar has the length ``keep - matmul``, because
    rounded estimates may not add up to ``keep``."""
    between = keep - matmul if gathers_first else matmul
    first, second = ("transfer", "matmul") if gathers_first else ("matmul", "transfer")
    names = {"transfer": "collective", "matmul": "matmul"}
    bars = [Bar(first, 0.0, between, names[first]), Bar(second, between, keep, names[second])]
    return steps.with_exposed(bars)


def _shape(facts: SiteFacts, piece: PlanPiece) -> tuple[Callable[[float, float], list[Bar]], bool]:
    """``(shape, merged)``. ``shape(matmul us, transfer us)`` makes the bars. ``merged``: they have fewer steps than the
    plan."""
    world_size, route = facts.collective.world_size, piece.parameters.get("route")
    gathers_first = _gathers_first(facts, piece)
    if not piece.overlaps:
        return steps.behind, False
    if facts.pattern.startswith("attention"):
        return steps.together, False
    if route is None or world_size < 2:
        return (steps.beside_gather if gathers_first else steps.beside), False
    parts = int(piece.parameters.get("sub_chunks", 1))
    bands = (route == "broadcast" and not gathers_first) or (
        facts.pattern == "embedding_all_to_all" and not gathers_first
    )
    slices = 1 if bands else min(world_size, MOST_STEPS)
    drawn = max(1, min(parts, MOST_STEPS // slices))
    merged = drawn != parts or slices not in (1, world_size)
    if bands:
        return lambda matmul, transfer: steps.bands(matmul, transfer, drawn), merged
    if gathers_first:
        return lambda matmul, transfer: steps.gather(matmul, transfer, slices, drawn), merged
    if facts.collective.kind == "all_reduce":
        return lambda matmul, transfer: steps.reduce_and_give_back(matmul, transfer, slices, drawn), merged
    what = "slice {} to its rank" if route == "direct" else "partial {} to its owner"
    return lambda matmul, transfer: steps.reduce(matmul, transfer, slices, drawn, what), merged


def _fitted(shape: Callable[[float, float], list[Bar]], matmul: float, transfer: float, total: float) -> list[Bar]:
    """Bars that end at ``total``."""
    bars = shape(matmul, transfer)
    if steps.end(bars) > total:
        low, high = 0.0, transfer
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if steps.end(shape(matmul, middle)) > total else (middle, high)
        bars = shape(matmul, low)
    last = steps.end(bars)
    if last > total:
        # The estimate is shorter than the matmul alone, so all bars are shortened by the same factor.
        factor = total / last
        return [replace(bar, start=bar.start * factor, end=bar.end * factor) for bar in bars]
    if total - last > 1e-3 * total:
        return [*bars, Bar("fixed", last, total, "fixed costs")]
    # The remainder comes from rounding the estimates; it is not a fixed cost.
    return [replace(bar, end=total) if bar.end == last else bar for bar in bars]

# SPDX-License-Identifier: Apache-2.0
"""Estimated time of overlapped sites, as written and by the plan, from the ``estimate_us`` of their plans' pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_inductor.report import words

if TYPE_CHECKING:
    from overlap_inductor.facts.decision import Decision
    from overlap_inductor.facts.decision import PlanPiece
    from overlap_inductor.report.report import OverlapReport


@dataclass(frozen=True)
class Times:
    """Estimated microseconds of the same work: ``keep`` as written, ``plan`` by the plan."""

    keep: float
    plan: float

    @property
    def slower(self) -> bool:
        return self.plan > self.keep

    @property
    def ratio(self) -> str:
        """``1.15x``, ``1.15x slower``; empty if a time is zero."""
        if min(self.keep, self.plan) <= 0:
            return ""
        high, low = max(self.keep, self.plan), min(self.keep, self.plan)
        return f"{high / low:.2f}x" + (" slower" if self.slower else "")

    def text(self, arrow: str = "->") -> str:
        """``9.10 ms -> 7.90 ms, 1.15x``."""
        times = f"{words.microseconds(self.keep)} {arrow} {words.microseconds(self.plan)}"
        return f"{times}, {self.ratio}" if self.ratio else times


def of_piece(piece: PlanPiece) -> Times | None:
    """The times of one site under ``piece``; ``None`` if it was not estimated."""
    estimate = piece.estimate_us
    if not {"keep", piece.schedule} <= estimate.keys():
        return None
    return Times(estimate["keep"], estimate[piece.schedule])


def moves(decision: Decision) -> bool:
    """Whether the decision has a piece that overlaps: it does, or (mode ``report``) it would."""
    return any(piece.schedule != "keep" for piece in decision.plan)


def of_decision(decision: Decision) -> Times | None:
    """The times of one site at the example's token count. Of several pieces the fastest one is taken to serve it."""
    if not moves(decision):
        return None
    estimate = decision.moving.estimate_us
    planned = [estimate.get(piece.schedule) for piece in decision.plan]
    known = [value for value in planned if value is not None]
    return Times(estimate["keep"], min(known)) if "keep" in estimate and len(known) == len(planned) else None


def of_report(report: OverlapReport) -> Times | None:
    """The times of all sites that are overlapped (mode ``report``: would be), at the example's sizes; ``None`` if there
    is no such site or one was not estimated."""
    return added(of_decision(s.decision) for s in report.sites if moves(s.decision))


def added(times: Iterable[Times | None]) -> Times | None:
    """The sum; ``None`` of nothing, and if one is ``None``."""
    every = list(times)
    known = [t for t in every if t is not None]
    if not known or len(known) < len(every):
        return None
    return Times(sum(t.keep for t in known), sum(t.plan for t in known))


def line(report: OverlapReport) -> str:
    """``estimated 9.10 ms -> 7.90 ms, 1.15x (overlapped sites together, at the example's sizes)``; empty without
    estimates."""
    times = of_report(report)
    if times is None:
        return ""
    what = "the plan's sites" if report.mode == "report" else "overlapped sites"
    return f"estimated {times.text()} ({what} together, at the example's sizes)"

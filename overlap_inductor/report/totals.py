# SPDX-License-Identifier: Apache-2.0
"""Estimated time of sites, as written and by the plan, from the ``estimate_us`` of their plans' pieces."""

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
        """``1.15x``, ``1.15x slower``. Three decimals if two would show no difference. Empty if a time is zero."""
        if min(self.keep, self.plan) <= 0:
            return ""
        high, low = max(self.keep, self.plan), min(self.keep, self.plan)
        decimals = 2 if high == low or high / low >= 1.005 else 3
        return f"{high / low:.{decimals}f}x" + (" slower" if self.slower else "")

    @property
    def change(self) -> str:
        """`` (14.3 % less)``, `` (5.0 % more)``; empty if the times are equal or one is zero."""
        if min(self.keep, self.plan) <= 0 or self.keep == self.plan:
            return ""
        percent = abs(self.plan / self.keep - 1) * 100
        return f" ({percent:.1f} % {'more' if self.slower else 'less'})"

    def text(self, arrow: str = "->") -> str:
        """``10.40 ms -> 9.04 ms, 1.15x``."""
        times = f" {arrow} ".join(self.each)
        return f"{times}, {self.ratio}" if self.ratio else times

    @property
    def each(self) -> tuple[str, str]:
        longest = max(self.keep, self.plan)
        return words.microseconds(self.keep, longest), words.microseconds(self.plan, longest)


def of_piece(piece: PlanPiece) -> Times | None:
    """The times of one site under ``piece``; ``None`` if the piece was not estimated."""
    estimate = piece.estimate_us
    if not {"keep", piece.schedule} <= estimate.keys():
        return None
    return Times(estimate["keep"], estimate[piece.schedule])


def moves(decision: Decision) -> bool:
    """Whether the plan overlaps, or would overlap in mode ``on``."""
    return any(piece.schedule != "keep" for piece in decision.plan)


def of_decision(decision: Decision) -> Times | None:
    """The times of one site, for the fastest schedule of the plan. The token count is the example's: that of the inputs
    with which the graph was compiled. ``None`` if the plan only keeps the site, or if a piece was not estimated."""
    if not moves(decision):
        return None
    estimate = decision.moving.estimate_us
    planned = [estimate.get(piece.schedule) for piece in decision.plan]
    known = [value for value in planned if value is not None]
    return Times(estimate["keep"], min(known)) if "keep" in estimate and len(known) == len(planned) else None


def of_report(report: OverlapReport) -> Times | None:
    """The sum of ``of_decision`` over the sites that are overlapped, or would be. ``None`` if there are none, or if one
    was not estimated."""
    return added(of_decision(s.decision) for s in report.sites if moves(s.decision))


def of_site(decision: Decision) -> Times | None:
    """The times of one site. For a kept site, both are the time as written. ``None`` if the site was not estimated."""
    if moves(decision):
        return of_decision(decision)
    kept = [piece.estimate_us["keep"] for piece in decision.plan if "keep" in piece.estimate_us]
    return Times(kept[0], kept[0]) if kept else None


def of_sites(reports: Iterable[OverlapReport]) -> Times | None:
    """The sum of ``of_site`` over all sites that were estimated; ``None`` if there are none."""
    known = (of_site(site.decision) for report in reports for site in report.sites)
    return added(times for times in known if times is not None)


def added(times: Iterable[Times | None]) -> Times | None:
    """The sum; ``None`` if there are no times, or one of them is ``None``."""
    every = list(times)
    known = [t for t in every if t is not None]
    if not known or len(known) < len(every):
        return None
    return Times(sum(t.keep for t in known), sum(t.plan for t in known))


def line(report: OverlapReport) -> str:
    """``estimated 9.10 ms -> 7.90 ms, 1.15x (overlapped sites together, at the example's sizes)``. Empty if
    ``of_report`` is ``None``."""
    times = of_report(report)
    if times is None:
        return ""
    what = "the plan's sites" if report.mode == "report" else "overlapped sites"
    return f"estimated {times.text()} ({what} together, at the example's sizes)"


def line_of_all(reports: Iterable[OverlapReport]) -> str:
    """``total of 161 sites of 2 graphs: estimated 214.72 ms -> 144.24 ms, 1.49x (32.8 % less)``; empty without sites.

    Kept sites count with their time as written. The total leaves out sites without an estimate, and the line says how
    many.
    """
    reports = list(reports)
    sites = [site for report in reports for site in report.sites]
    if not sites:
        return ""
    where = f"{words.count(len(sites), 'site')} of {words.count(len(reports), 'graph')}"
    total = of_sites(reports)
    if total is None:
        return f"total of {where}: no site has an estimate"
    left_out = sum(of_site(site.decision) is None for site in sites)
    without = f"; not counted: {words.count(left_out, 'site')} without an estimate" if left_out else ""
    return f"total of {where}: estimated {total.text()}{total.change}{without}"

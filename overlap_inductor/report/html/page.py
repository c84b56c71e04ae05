# SPDX-License-Identifier: Apache-2.0
"""``index.html`` of one graph: what ``report.txt`` says (except tracebacks), the timelines, and the graph's text before
and after the pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_inductor.report import stretches
from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.advice import ADVICE
from overlap_inductor.report.groups import SiteGroup
from overlap_inductor.report.groups import group_near_misses
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.groups import has_layer_numbers
from overlap_inductor.report.html.diff import diff
from overlap_inductor.report.html.environment import TONES
from overlap_inductor.report.html.environment import render
from overlap_inductor.report.html.figure import figures
from overlap_inductor.report.text import REPEATED_BLOCK

if TYPE_CHECKING:
    from overlap_inductor.facts.decision import PlanPiece
    from overlap_inductor.report.report import OverlapReport


STRETCH_TONES = {"rewritten": TONES["overlapped"], "kept": TONES["kept"], "refused": TONES["refused"]}
"""The colour class of a stretch's label, by the status of the stretch."""


@dataclass(frozen=True)
class Refusal:
    """A reason code, and the groups of sites or near misses that have it. ``uses``: for each group, ``(module
    and size of the group, text of the reason)``."""

    status: str
    tone: str
    code: str
    meaning: str
    advice: str
    uses: tuple[tuple[str, str], ...]


def render_html(report: OverlapReport, before: str | None = None, after: str | None = None) -> str:
    """The report as one HTML document without links to anything outside.

    Args:
        before / after: the graph's text before and after the pass; by default the report's own.
    """
    groups = group_sites(report)
    before = report.before if before is None else before
    after = report.after if after is None else after
    text = before + after
    identities = dict.fromkeys(s.facts.id for s in report.sites if s.facts.id)
    # Only sites that the graph's text names get an anchor, because a link must lead to a line.
    anchors = {identity: f"line-{n}" for n, identity in enumerate(identities) if identity in text}
    statuses = Counter(words.status(s.decision) for s in report.sites)
    drawn, undrawn = figures(groups)
    return render(
        "graph.html",
        report=report,
        facts=_facts(report),
        statuses=[(TONES[s], statuses[s], s) for s in words.STATUSES if statuses[s] or s == "overlapped"],
        times=totals.of_report(report),
        notices=_notices(report),
        groups=groups,
        bars=_bars,
        times_of=totals.of_decision,
        anchors=anchors,
        refusals=_refusals(report, groups),
        figures=drawn,
        undrawn=undrawn,
        stretches=stretches.rows(report.stretches),
        stretch_tones=STRETCH_TONES,
        switches=words.switches(report),
        diff=diff(before, after, anchors),
    )


def _facts(report: OverlapReport) -> list[str]:
    lines = [f"overlap_inductor {report.overlap_inductor}", f"torch {report.torch}"]
    lines += [f"world size {report.world_size}", f"mode {report.mode}"]
    if report.plan_hash:
        lines.append(f"plan {report.plan_hash}")
    return lines + words.memory(report)


def _notices(report: OverlapReport) -> list[str]:
    notices = list(report.notices)
    if report.mode == "report":
        notices.insert(0, f"Mode report: the graph was not changed{words.mode_on(report)}.")
    if report.sites and not has_layer_numbers(report):
        notices.append(REPEATED_BLOCK)
    return notices


def _bars(piece: PlanPiece) -> list[tuple[str, float, bool, str]]:
    """A bar for each schedule that was estimated, shortest first: ``(schedule, length in per cent of the longest bar,
    whether it is the shortest, time)``."""
    values = {name: us for name, us in piece.estimate_us.items() if name not in words.PARTS}
    longest, best = max(values.values(), default=0.0), min(values.values(), default=0.0)
    return [
        (name, 100 * value / longest if longest else 0.0, value == best, words.microseconds(value, longest))
        for name, value in sorted(values.items(), key=lambda item: item[1])
    ]


def _refusals(report: OverlapReport, groups: Sequence[SiteGroup]) -> list[Refusal]:
    entries: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for group in groups:
        where = f"{group.module} ({len(group.sites)})"
        for reason in group.reasons:
            entries.setdefault((words.status(group.decision), reason.code), []).append((where, reason.text))
    for miss in group_near_misses(report):
        where = f"{miss.module} ({len(miss.misses)}): {words.collective(miss.collective)}"
        entries.setdefault(("near miss", miss.reason.code), []).append((where, miss.reason.text))
    return [
        Refusal(
            status,
            TONES.get(status, "wait"),
            code,
            words.STATUS_MEANING.get(status, "a collective without a site"),
            ADVICE.get(code, ""),
            tuple(uses),
        )
        for (status, code), uses in entries.items()
    ]

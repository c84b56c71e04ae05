# SPDX-License-Identifier: Apache-2.0
"""Publish what happened to a graph: counters, log lines, trace artifacts and the dump. Mode ``strict`` raises if a site
was refused or something failed."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import StrictError
from overlap_inductor.facts.decision import Reason
from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.notice import show
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport
from overlap_inductor.torch_compat import telemetry

log = logging.getLogger("overlap_inductor")

KEPT_REPORTS = 256
_reports: deque[OverlapReport] = deque(maxlen=KEPT_REPORTS)
_lock = threading.Lock()


def last_report() -> OverlapReport | None:
    """The report of the graph that was last compiled or loaded from a cache; ``None`` before the first."""
    with _lock:
        return _reports[-1] if _reports else None


def all_reports() -> list[OverlapReport]:
    """The reports of the last 256 graphs of this process, oldest first."""
    with _lock:
        return list(_reports)


def forget_reports() -> None:
    """Drop all reports that ``last_report`` and ``all_reports`` would return."""
    with _lock:
        _reports.clear()


def activate(report: OverlapReport, config: OverlapConfig | None = None, *, from_cache: bool = False) -> None:
    """Publish a graph's report.

    Args:
        config: the switches that are set now. They name the dump folder, because a cached report does not. With
            ``None``, no dump is written, and the log line is shown only if the user configured logging.
        from_cache: whether the graph was loaded from a cache.

    Raises:
        StrictError: the report's mode is ``strict``, and a site was refused, or a rewrite or the pass failed. The
            report has been published by then.
    """
    with _lock:
        _reports.append(report)
    telemetry.count(report.counters())
    _trace(report)
    where = _dump(report, config.dump) if config is not None and config.dump else "set OVERLAP_INDUCTOR_DUMP=FOLDER"
    _log(report, where, from_cache, shown=config is not None and config.notice == "on")
    if report.mode == "strict":
        _insist(report)


def fell_back(reports: Sequence[OverlapReport], text: str, dump: str | None = None) -> None:
    """Record that a graph runs without overlap because ranks differ. The record goes to the graph's and its subgraphs'
    reports, the counters and the dump."""
    for report in reports:
        report.notices.append(text)
        overlapped = report.counters()["sites_overlapped"]
        if overlapped:
            telemetry.count(Counter({"reason.ranks_differ": overlapped}))
        if dump:
            from overlap_inductor.report.dump import write_dump

            write_dump(report, dump, telemetry.global_rank())


def summary(report: OverlapReport) -> str:
    """One line: ``graph 0_0 forward: 5 sites found, 4 overlapped (4 ring), 1 kept (too_small)``."""
    if words.pass_failed(report):
        return f"graph {report.graph} {report.phase}: {words.headline(report)}"
    schedules: Counter[str] = Counter()
    others: dict[str, list[SiteReport]] = {}
    for site in report.sites:
        if site.decision.status == "overlapped":
            schedules.update({p.schedule for p in site.decision.plan if p.schedule != "keep"} or {"keep"})
        else:
            others.setdefault(site.decision.status, []).append(site)
    number = sum(s.decision.status == "overlapped" for s in report.sites)
    parts = [f"{len(report.sites)} site{'s' * (len(report.sites) != 1)} found", f"{number} overlapped"]
    if schedules:
        parts[-1] += f" ({', '.join(f'{count} {name}' for name, count in sorted(schedules.items()))})"
    for status, sites in sorted(others.items()):
        codes = sorted({r.code for s in sites for r in s.decision.reasons})
        parts.append(f"{len(sites)} {status}" + (f" ({', '.join(codes)})" if codes else ""))
    if report.near_misses:
        parts.append(f"{len(report.near_misses)} near miss{'es' * (len(report.near_misses) != 1)}")
    return f"graph {report.graph} {report.phase}: {', '.join(parts)}"


def _dump(report: OverlapReport, folder: str) -> str:
    """Write the report below ``folder``. Returns the path of ``report.txt``, or a text that says that nothing was
    written."""
    from overlap_inductor.report.dump import write_dump

    place = write_dump(report, folder, telemetry.global_rank())
    if place is None:
        return "not written, see the warning"
    return str(Path(folder, place.parent.name, place.name, "report.txt"))


def announcement(report: OverlapReport, where: str, from_cache: bool = False) -> str:
    """The ``summary``, the estimate and the place of the report (``where``). If there is no estimate and nothing is
    overlapped, the main reason takes the place of the estimate.

    ``graph 0_0 forward: 2 sites found, 2 overlapped (2 ring), estimated 9.10 ms -> 7.90 ms, 1.15x; report: FILE``
    ``graph 0_0 forward: 1 site found, 0 overlapped, 1 kept (too_small): TEXT OF THE REASON; report: FILE``
    """
    text = summary(report)
    if times := totals.of_report(report):
        text += f", {'would be ' if report.mode == 'report' else ''}estimated {times.text()}"
    elif (reason := _main_reason(report)) is not None:
        text += f": {reason.text}"
    return f"{text}{' [from cache]' if from_cache else ''}; report: {where}"


def _main_reason(report: OverlapReport) -> Reason | None:
    """The first reason with the most frequent code: of the sites, or else of the near misses. ``None`` if a site is
    overlapped, or if there are no reasons."""
    if any(site.decision.status == "overlapped" for site in report.sites):
        return None
    reasons = [r for site in report.sites for r in site.decision.reasons]
    reasons = reasons or [miss.reason for miss in report.near_misses]
    codes = Counter(reason.code for reason in reasons)
    return max(reasons, key=lambda reason: codes[reason.code], default=None)


def _log(report: OverlapReport, where: str, from_cache: bool, shown: bool) -> None:
    # The ranks of a group have the same plan. So only rank 0 logs at level INFO, and other ranks at level DEBUG.
    first = telemetry.global_rank() == 0
    level = logging.INFO if first else logging.DEBUG
    line = announcement(report, where, from_cache)
    if first and shown and (report.sites or report.near_misses or words.pass_failed(report)):
        show(line)
    else:
        log.log(level, "%s", line)
    for notice in report.notices:
        log.log(level, "graph %s %s: %s", report.graph, report.phase, notice)
    if not log.isEnabledFor(logging.DEBUG):
        return
    for site in report.sites:
        log.debug("site %s", _describe(site))
    for miss in report.near_misses:
        log.debug("near miss %s %s: %s: %s", miss.collective.kind, miss.module, miss.reason.code, miss.reason.text)


def _describe(site: SiteReport) -> str:
    facts, decision = site.facts, site.decision
    how = ", ".join(dict.fromkeys(p.schedule for p in decision.plan))
    why = "; ".join(f"{r.code}: {r.text}" for r in decision.reasons)
    text = f"{facts.id} {facts.pattern} {facts.module}: {decision.status} ({decision.source})"
    return text + (f" {how}" if how else "") + (f": {why}" if why else "")


def _trace(report: OverlapReport) -> None:
    def text() -> str:
        from overlap_inductor.report.text import render_text

        return render_text(report)

    telemetry.trace_artifact("overlap_inductor_report", "string", text)
    telemetry.trace_artifact("overlap_inductor_sites", "json", lambda: json.dumps(report.to_dict()))


_WHOLE = {"pass": "the overlap pass", "sequence_parallel": "the sequence-parallel rewrite"}
"""``{stage: the stage's name in an error}`` for the stages whose failure concerns the whole graph."""


def _insist(report: OverlapReport) -> None:
    whole = next((f for f in report.failures if f.stage in _WHOLE), None)
    if whole is not None:
        part = _WHOLE[whole.stage]
        raise StrictError(
            f"OVERLAP_INDUCTOR=strict: {part} failed on graph {report.graph} {report.phase}: {whole.error}. "
            f"{BUG_REPORT} OVERLAP_INDUCTOR=on compiles the graph without {part}.\n\n{whole.traceback}"
        )
    bad = [s for s in report.sites if s.decision.status in ("refused", "failed")]
    if bad:
        lines = "\n".join(f"  {_describe(site)}" for site in bad)
        raise StrictError(
            f"OVERLAP_INDUCTOR=strict: {len(bad)} of {len(report.sites)} sites of graph {report.graph} {report.phase} "
            f"could not be overlapped:\n{lines}\n"
            "Change what the reasons name, or set OVERLAP_INDUCTOR=on to run these sites as written."
            + (f" {BUG_REPORT}" if report.failures else "")
        )

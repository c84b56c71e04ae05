# SPDX-License-Identifier: Apache-2.0
"""``report.txt``: one graph's report for a terminal. A site that repeats from layer to layer takes one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TYPE_CHECKING

from overlap_inductor.report import stretches
from overlap_inductor.report import totals
from overlap_inductor.report import words
from overlap_inductor.report.advice import advice_for
from overlap_inductor.report.groups import MissGroup
from overlap_inductor.report.groups import SiteGroup
from overlap_inductor.report.groups import group_near_misses
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.groups import has_layer_numbers

if TYPE_CHECKING:
    from overlap_inductor.report.report import OverlapReport

WIDTH = 118
ADVICE_TITLE = "what you can do"
REPEATED_BLOCK = (
    "No module name holds a layer number. If one block was compiled and is called several times (per-block "
    "compilation), this one graph serves every call with the same code. Count its sites once for each call."
)


def render_text(report: OverlapReport) -> str:
    groups = group_sites(report)
    sections = [_header(report), _switches(report), _sites(report, groups), _stretches(report)]
    sections += [_reasons(groups), _plans(groups)]
    sections += [_near_misses(group_near_misses(report)), _advice(report), _notices(report), _failures(report)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _header(report: OverlapReport) -> list[str]:
    lines = [
        f"overlap_inductor {report.overlap_inductor}, torch {report.torch}",
        f"graph {report.graph}, {report.phase}, world size {report.world_size}, mode {report.mode}",
        words.headline(report),
    ]
    if estimated := totals.line(report):
        lines.append(estimated)
    if report.mode == "report":
        lines.append(f"mode report: the graph was not changed{words.mode_on(report)}")
    if report.plan_hash:
        lines.append(f"plan {report.plan_hash} (the ranks compare it before they exchange data)")
    lines += words.memory(report)
    return lines


def _switches(report: OverlapReport) -> list[str]:
    rows = words.switches(report)
    return _section("requested and effective", _table(("switch", "requested", "effective"), rows)) if rows else []


def _sites(report: OverlapReport, groups: Sequence[SiteGroup]) -> list[str]:
    if not groups:
        return []
    rows = [
        (g.module, str(len(g.sites)), g.facts.pattern, words.matmuls(g.facts), words.outcome(g.decision))
        for g in groups
    ]
    lines = _table(("module", "sites", "pattern", "matmul [M x N x K]", "outcome"), rows)
    present = {words.status(g.decision) for g in groups}
    lines.append("")
    lines += [f"{status}: {words.STATUS_MEANING[status]}" for status in words.STATUSES if status in present]
    if not has_layer_numbers(report):
        lines += ["", *textwrap.wrap(REPEATED_BLOCK, WIDTH)]
    return _section("sites", lines)


def _stretches(report: OverlapReport) -> list[str]:
    lines = []
    for row in stretches.rows(report.stretches):
        lines.append(f"{row.module}: {row.written} ({row.place})")
        lines += _hanging("  ", row.outcome)
        lines += [line for text in (row.times, row.needs) if text for line in _hanging("  ", text)]
        lines += [line for reason in row.reasons for line in _hanging(f"  {reason.code}: ", reason.text)]
    return _section(stretches.TITLE, lines) if lines else []


def _reasons(groups: Sequence[SiteGroup]) -> list[str]:
    lines = []
    for group in groups:
        # The reason ``report_mode`` says nothing about the site itself, and the head already names the mode.
        reasons = [reason for reason in group.reasons if reason.code != "report_mode"]
        if not reasons:
            continue
        lines.append(f"{group.module} ({group.facts.pattern}): {words.status(group.decision)}")
        for reason in reasons:
            lines += _hanging(f"  {reason.code}: ", reason.text)
    return _section("reasons", lines) if lines else []


def _plans(groups: Sequence[SiteGroup]) -> list[str]:
    alike: dict[str, list[SiteGroup]] = {}
    for group in groups:
        if group.decision.plan:
            key = repr((group.decision.plan, group.decision.source, words.collective(group.facts.collective)))
            alike.setdefault(key, []).append(group)
    lines = []
    for members in alike.values():
        decision = members[0].decision
        lines += [member.module for member in members]
        source = words.SOURCES.get(decision.source, decision.source)
        lines.append(f"  {words.collective(members[0].facts.collective)}; decided by: {source}")
        rows = [
            (f"  tokens {words.tokens(piece)}", words.schedule(piece), words.parameters(piece))
            for piece in decision.plan
        ]
        for row, piece in zip(_aligned(rows), decision.plan, strict=True):
            lines.append(row)
            if estimated := words.estimates(piece):
                lines.append(f"    estimated {estimated}")
    return _section("plan by token count (rows of the rank's own matmul)", lines) if lines else []


def _near_misses(groups: Sequence[MissGroup]) -> list[str]:
    lines = []
    for group in groups:
        number = words.count(len(group.misses), "time")
        lines.append(f"{group.module}: {words.collective(group.collective)}, {number}")
        lines += _hanging(f"  {group.reason.code}: ", group.reason.text)
    return _section("near misses: collectives without a site", lines) if lines else []


def _advice(report: OverlapReport) -> list[str]:
    lines = [line for code, text in advice_for(words.reason_codes(report)) for line in _hanging(f"{code}: ", text)]
    return _section(ADVICE_TITLE, lines) if lines else []


def _notices(report: OverlapReport) -> list[str]:
    lines = [line for notice in report.notices for line in _hanging("- ", notice)]
    return _section("notices", lines) if lines else []


def _failures(report: OverlapReport) -> list[str]:
    lines = [line for failure in report.failures for line in failure.traceback.splitlines()]
    return _section("errors inside the pass", lines) if lines else []


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, "-" * len(title), *lines]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return _aligned([head, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _hanging(label: str, text: str) -> list[str]:
    indent = " " * (len(label) - len(label.lstrip()) + 2)
    return textwrap.wrap(
        label + text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [label.rstrip()]

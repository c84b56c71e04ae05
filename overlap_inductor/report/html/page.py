"""``index.html``: one graph's report as a self-contained page. It shows what ``report.txt`` says, the timelines and
both graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from html import escape

from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.report import words
from overlap_inductor.report.groups import SiteGroup
from overlap_inductor.report.groups import group_near_misses
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.groups import has_layer_numbers
from overlap_inductor.report.html.diff import render_diff
from overlap_inductor.report.html.parts import page
from overlap_inductor.report.html.timeline import render_sketch
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import REPEATED_BLOCK

TONES = {"overlapped": "good", "kept": "wait", "refused": "warn", "failed": "bad"}


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
    # Only sites that the graph's text names get an anchor: a link that leads nowhere is worse than none.
    anchors = {identity: f"line-{n}" for n, identity in enumerate(identities) if identity in text}
    sections = [
        ("sites", "Sites", _sites(report, groups, anchors)),
        ("reasons", "Why not", _reasons(report, groups)),
        ("timeline", "Timeline", _timelines(groups)),
        ("switches", "Requested and effective", _switches(report)),
        ("graph", "Graph before and after", render_diff(before, after, anchors)),
    ]
    shown = [(name, title, html) for name, title, html in sections if html]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in shown)
    body = _head(report) + f"<nav>{links}</nav>" + _tiles(report) + _notices(report)
    body += "".join(f'<section id="{name}"><h2>{escape(title)}</h2>{html}</section>' for name, title, html in shown)
    return page(f"overlap_inductor: graph {report.graph} {report.phase}", body)


def _head(report: OverlapReport) -> str:
    lines = [f"overlap_inductor {report.overlap_inductor}", f"torch {report.torch}"]
    lines += [f"world size {report.world_size}", f"mode {report.mode}"]
    if report.plan_hash:
        lines.append(f"plan {report.plan_hash}")
    lines += words.memory(report)
    facts = escape(" \u00b7 ".join(lines))
    return f'<h1>Graph {escape(report.graph)}, {escape(report.phase)}</h1><div class="quiet">{facts}</div>'


def _tiles(report: OverlapReport) -> str:
    statuses = Counter(s.decision.status for s in report.sites)
    tiles = [("", str(len(report.sites)), "sites found")]
    tiles += [(TONES[s], str(statuses[s]), s) for s in words.STATUSES if statuses[s] or s == "overlapped"]
    tiles.append(("", str(len(report.near_misses)), "near misses"))
    html = "".join(f'<div class="tile {tone}"><b>{value}</b><span>{label}</span></div>' for tone, value, label in tiles)
    html += _estimate_tile(report)
    present = [s for s in words.STATUSES if statuses[s]]
    share = "".join(f'<i class="{TONES[s]}" style="flex:{statuses[s]}" title="{statuses[s]} {s}"></i>' for s in present)
    return f'<div class="tiles">{html}</div>' + (f'<div class="share">{share}</div>' if share else "")


def _estimate_tile(report: OverlapReport) -> str:
    """The estimated time of the overlapped sites before and after. Empty unless each of them has an estimate."""
    pieces = [s.decision.moving for s in report.sites if s.decision.status == "overlapped" and s.decision.plan]
    if not pieces or not all({"keep", p.schedule} <= p.estimate_us.keys() for p in pieces):
        return ""
    keep = sum(p.estimate_us["keep"] for p in pieces)
    plan = sum(p.estimate_us[p.schedule] for p in pieces)
    value = f"{words.microseconds(keep)} \u2192 {words.microseconds(plan)}"
    tone = "good" if plan < keep else "warn"
    return (
        f'<div class="tile wide {tone}"><b>{value}</b><span>estimated, overlapped sites together, at the example'
        " sizes</span></div>"
    )


def _notices(report: OverlapReport) -> str:
    notices = list(report.notices)
    if report.mode == "report":
        notices.insert(0, "Mode report: the graph was left as it was; the plan below is what mode on would run.")
    if report.sites and not has_layer_numbers(report):
        notices.append(REPEATED_BLOCK)
    return "".join(f'<div class="note">{escape(notice)}</div>' for notice in notices)


def _sites(report: OverlapReport, groups: Sequence[SiteGroup], anchors: Mapping[str, str]) -> str:
    if not groups:
        return '<p class="quiet">No matmul beside a collective was found in this graph.</p>'
    head = "".join(f"<span>{h}</span>" for h in ("module", "sites", "pattern", "matmul [M x N x K]", "outcome"))
    tools = (
        '<div class="tools script-only"><input id="filter" type="search" placeholder="filter: a module, pattern,'
        ' reason, ..." aria-label="filter the sites"><button type="button" id="all">open all</button><span id="shown"'
        ' class="quiet"></span></div>'
    )
    rows = "".join(_site_row(group, anchors) for group in groups)
    return f'{tools}<div class="scroll"><div class="card sites"><div class="row head">{head}</div>{rows}</div></div>'


def _site_row(group: SiteGroup, anchors: Mapping[str, str]) -> str:
    facts, decision = group.facts, group.decision
    outcome = words.outcome(decision).removeprefix(decision.status).removeprefix(": ")
    cells = (
        '<span class="name'
        f' mono">{escape(group.module)}</span><span>{len(group.sites)}</span><span>{escape(facts.pattern)}</span><span'
        f' class="mono">{escape(words.matmuls(facts))}</span><span><span class="chip'
        f' {TONES.get(decision.status, "")}">{escape(decision.status)}</span> {escape(outcome)}</span>'
    )
    detail = f"<h3>collective</h3>{escape(words.collective(facts.collective))}"
    if facts.derived_from:
        detail += f"<h3>derived from</h3>{escape(facts.derived_from)}"
    if decision.plan:
        source = words.SOURCES.get(decision.source, decision.source)
        detail += f"<h3>plan by token count (decided by: {escape(source)})</h3>{_plan(decision.plan)}"
    for reason in group.reasons:
        detail += f"<h3>{escape(reason.code)}</h3>{escape(reason.text)}"
    members = "".join(_member(site.facts.module, site.facts.id, anchors) for site in group.sites)
    detail += f'<h3>{words.count(len(group.sites), "site")}</h3><ul class="members">{members}</ul>'
    return f'<details><summary class="row">{cells}</summary><div class="detail">{detail}</div></details>'


def _member(module: str, identity: str, anchors: Mapping[str, str]) -> str:
    link = f' <a href="#{escape(anchors[identity])}">in the graph</a>' if identity in anchors else ""
    return (
        f'<li><span class="mono">{escape(module)}</span> <span class="quiet mono">{escape(identity)}</span>{link}</li>'
    )


def _plan(plan: Iterable[PlanPiece]) -> str:
    rows = ""
    for piece in plan:
        cells = (f"tokens {words.tokens(piece)}", words.schedule(piece), words.parameters(piece) or "no parameters")
        rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f"<td>{_bars(piece)}</td></tr>"
    return f"<table>{rows}</table>"


def _bars(piece: PlanPiece) -> str:
    values = {name: us for name, us in piece.estimate_us.items() if name not in words.PARTS}
    if not values:
        return '<span class="quiet">no estimate</span>'
    longest, best = max(values.values()), min(values.values())
    html = ""
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        width = 100 * value / longest if longest else 0
        tone = ' class="best"' if value == best else ""
        html += (
            f"<span>{escape(name)}</span><i{tone}"
            f' style="width:{width:.1f}%"></i><span>{words.microseconds(value)}</span>'
        )
    return f'<div class="bars">{html}</div>'


def _reasons(report: OverlapReport, groups: Sequence[SiteGroup]) -> str:
    entries: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for group in groups:
        where = f"{group.module} ({len(group.sites)})"
        for reason in group.reasons:
            entries.setdefault((group.decision.status, reason.code), []).append((where, reason.text))
    for miss in group_near_misses(report):
        where = f"{miss.module} ({len(miss.misses)}): {words.collective(miss.collective)}"
        entries.setdefault(("near miss", miss.reason.code), []).append((where, miss.reason.text))
    html = ""
    for (status, code), uses in entries.items():
        meaning = words.STATUS_MEANING.get(status, "a collective that is no site")
        lines = "".join(f'<p><span class="mono">{escape(where)}</span><br>{escape(text)}</p>' for where, text in uses)
        html += (
            f'<div class="reason"><span class="chip {TONES.get(status, "wait")}">{escape(status)}</span>'
            f' <b>{escape(code)}</b> <span class="quiet">{escape(meaning)}</span>{lines}</div>'
        )
    return f'<div class="card">{html}</div>' if html else ""


def _timelines(groups: Sequence[SiteGroup]) -> str:
    """One sketch for each pattern that was overlapped by schedule ``ring``: that of its first such site."""
    seen: dict[str, str] = {}
    for group in groups:
        if (
            group.decision.status == "overlapped"
            and group.decision.moving.schedule == "ring"
            and group.facts.collective.world_size > 1
        ):
            seen.setdefault(group.facts.pattern, render_sketch(group.module, group.sites[0], group.decision.moving))
    return "".join(seen.values())


def _switches(report: OverlapReport) -> str:
    rows = words.switches(report)
    if not rows:
        return ""
    html = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<div class="card"><table><tr><th>switch</th><th>requested</th><th>effective in this'
        f" graph</th></tr>{html}</table></div>"
    )

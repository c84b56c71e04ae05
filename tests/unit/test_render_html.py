# SPDX-License-Identifier: Apache-2.0
"""The HTML page is self-contained, never runs a graph's text as code, marks changed lines, and stays fast for large
graphs."""

from __future__ import annotations

import re
import time

import pytest

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.report.html.diff import CONTEXT
from overlap_inductor.report.html.diff import diff
from overlap_inductor.report.html.diff import merge
from overlap_inductor.report.html.figure import MOST_FIGURES
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.words import STATUS_MEANING
from tests.support.html_page import Page
from tests.unit import sample_reports as samples

ALL = [samples.llama(3), samples.block(), samples.empty(), samples.hostile(), samples.every_schedule()]


@pytest.mark.parametrize("report", ALL)
def test_page_is_well_formed(report: OverlapReport) -> None:
    assert Page(render_html(report)).problems == []


@pytest.mark.parametrize("report", ALL)
def test_page_loads_nothing(report: OverlapReport) -> None:
    """The page may be opened on a machine without a network."""
    html = render_html(report)
    page = Page(html)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import", html)
    assert any("default-src 'none'" in (m.get("content") or "") for m in page.named("meta"))


def test_markup_in_names_is_text() -> None:
    """The report's names, reasons, notice and graph hold a script element. The page must escape all of them."""
    html = render_html(samples.hostile())
    page = Page(html)
    assert len(page.named("script")) == 1, "only the page's own script"
    assert "<script>alert" not in html
    assert page.words.count("<script>alert('x')</script>") >= 6, "in the notice, site, reason, near miss and graph"


def test_names_with_quotes_stay_inside_their_attribute() -> None:
    report = samples.llama(1)
    report.sites[0] = samples.site('x" onclick="alert(1)', samples.overlapped(), identity="mmar-lm_head")
    for _, attributes in Page(render_html(report)).elements:
        assert "onclick" not in attributes


def test_page_shows_what_the_report_says() -> None:
    words = Page(render_html(samples.llama(80))).words
    assert "layers.{0..79}.mlp.down_proj" in words
    assert "layers.41.mlp.down_proj" in words, "the group opens into its members"
    assert "the matmul's result has 2 users" in words
    assert "micro_pipeline_tp is on" in words
    assert re.search(r"161\s*sites found", words)
    assert re.search(r"160\s*overlapped", words)
    assert "each row ends at its estimate" in words
    assert "What you can do: Read the result behind the collective" in " ".join(words.split())


def test_links_into_the_graph_lead_to_a_line() -> None:
    """A link needs a site that the graph names, and a line that exists."""
    page = Page(render_html(samples.llama(2)))
    links = [a["href"] for a in page.named("a") if (a.get("href") or "").startswith("#line-")]
    identities = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(links) == 1, "the sample's graph names only the id of lm_head"
    assert links[0] is not None and links[0][1:] in identities
    assert len(identities) == len(set(identities))


def test_given_graphs_replace_the_reports_own() -> None:
    words = Page(render_html(samples.llama(1), before="one\n", after="two\n")).words
    assert "one" in words and "two" in words and "loop.default" not in words


def test_changed_lines_are_marked() -> None:
    lines = merge("a\nb\nc\n", "a\nx\nc\nd\n")
    assert [(x.kind, x.text, x.before, x.after) for x in lines] == [
        ("same", "a", 1, 1),
        ("del", "b", 2, None),
        ("ins", "x", None, 2),
        ("same", "c", 3, 3),
        ("ins", "d", None, 4),
    ]
    page = Page(render_html(samples.empty(), before="a\nb\nc\n", after="a\nx\nc\nd\n"))
    assert (len(page.named("del")), len(page.named("ins"))) == (1, 2)
    assert sum("data-change" in attributes for _, attributes in page.elements) == 2, (
        "two runs of changes to step through"
    )


def test_unchanged_runs_are_folded_and_lose_no_line() -> None:
    before = [f"line {i}" for i in range(100)]
    after = [*before[:50], "new", *before[50:]]
    page = Page(render_html(samples.empty(), before="\n".join(before), after="\n".join(after)))
    assert len(page.named("details")) == 2
    assert f"{50 - CONTEXT} unchanged lines" in page.words
    for line in after:
        assert line in page.words


def test_five_thousand_lines_render_in_seconds() -> None:
    """A page is written while a model compiles, so the time must not grow with the square of the number of lines."""
    before = [f"mm_{i}: float32[4, 4] = aten.mm.default(view_{i}, permute_{i})" for i in range(5000)]
    after = [
        text
        for i, line in enumerate(before)
        for text in ([f"step_{i}_{k}" for k in range(8)] if i % 50 == 0 else [line])
    ]
    report = samples.llama(80)
    report.before, report.after = "\n".join(before), "\n".join(after)
    start = time.process_time()
    html = render_html(report)
    assert time.process_time() - start < 10
    assert html.count('<ins class="l"') == 800


def test_a_line_of_two_sites_has_both_anchors() -> None:
    found = diff("", "one two\none\n", {"one": "line-0", "two": "line-1"})
    assert [line.anchors for _, lines in found.blocks for line in lines] == [("line-0", "line-1"), ()]


@pytest.mark.parametrize("report", [samples.llama(2), samples.every_schedule()])
def test_a_page_has_a_dark_and_a_narrow_form(report: OverlapReport) -> None:
    """Each colour must also have a value for dark pages."""
    html = render_html(report)
    light, dark = re.findall(r":root \{(.*?)\}", html, re.S)
    assert "@media (prefers-color-scheme: dark)" in html and "color-scheme: light dark" in light
    assert re.findall(r"(--\w+):", light) == re.findall(r"(--\w+):", dark)
    assert set(re.findall(r"var\((--\w+)", html)) <= {*re.findall(r"(--\w+):", light), "--tone"}
    assert "@media (max-width: 760px)" in html and "width=device-width" in html


def test_total_has_a_ratio() -> None:
    words = " ".join(Page(render_html(samples.every_schedule())).words.split())
    assert "17.45 ms \u2192 12.10 ms, 1.44x estimated, overlapped sites together" in words


def test_a_slower_plan_is_marked_as_slower_and_drawn_red() -> None:
    report = samples.empty()
    report.sites = [samples.planned(*samples.PIECES["ring slower"], "m")]
    page = Page(render_html(report))
    words = " ".join(page.words.split())
    assert words.count("1342 us \u2192 1610 us, 1.20x slower") == 2, "in the total and beside the timeline"
    boxes = [attributes for _, attributes in page.elements if (attributes.get("class") or "").startswith("verdict")]
    assert [box["class"] for box in boxes] == ["verdict slower"]
    assert any(attributes.get("title") == "268 us slower" for _, attributes in page.elements)
    assert "tile wide bad" in render_html(report) and "saved" not in words


def test_the_page_explains_its_words_and_colours() -> None:
    """A text explains each status that a site of the report has, and each box of a timeline."""
    report = samples.empty()
    report.sites = [samples.planned(*samples.PIECES[name], "m") for name in ("ring slower", "ring gather")]
    report.sites.append(samples.site("lm_head", samples.refused("lm_head")))
    words = " ".join(Page(render_html(report)).words.split())
    for status in ("overlapped", "refused"):
        assert f"{status} {STATUS_MEANING[status]}" in words
    assert STATUS_MEANING["failed"] not in words, "no site failed"
    for text in ("saved against the graph as written", "slower than the graph as written"):
        assert text in words


def test_unchanged_lines_count_as_folded_only_if_they_are() -> None:
    assert "4 lines removed, 2 added, 2 unchanged." in Page(render_html(samples.llama(1))).words
    many = "".join(f"x{n}\n" for n in range(10))
    words = Page(render_html(samples.llama(1), many + "a\n", many + "b\n")).words
    assert "1 line removed, 1 added, 10 unchanged, of which 7 folded." in words


def test_a_tick_at_the_right_edge_stays_on_the_page() -> None:
    report = samples.empty()
    estimate = {"keep": 9662.0, "matmul": 4636.0, "collective": 5026.0, "ring": 6520.0}
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 4, "route": "owner"}, estimate_us=estimate)
    report.sites = [samples.planned("matmul_all_reduce", "all_reduce", piece, "m")]
    assert re.findall(r'<span class="end" [^>]*>(\d+)', render_html(report)) == ["10000"]


def test_a_sketch_without_estimates_says_so() -> None:
    report = samples.empty(before="x", after="y")
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 2, "route": "owner"})
    report.sites = [samples.planned("matmul_all_reduce", "all_reduce", piece, "m")]
    page = Page(render_html(report))
    assert "This site has no estimate" in page.words
    assert not any(attributes.get("class") == "axis" for _, attributes in page.elements), "lengths without a unit"


def test_mode_report_shows_what_mode_on_would_run() -> None:
    report = samples.empty(mode="report")
    report.sites = [samples.planned(*samples.PIECES["ring scatter"], "m", status="kept")]
    report.sites[0].decision.reasons.append(Reason("report_mode", "OVERLAP_INDUCTOR=report leaves the graph alone"))
    words = " ".join(Page(render_html(report)).words.split())
    assert "1342 us \u2192 902 us, 1.49x estimated, the plan's sites together" in words
    assert "Set OVERLAP_INDUCTOR=on to change the graph." in words


def test_plans_beyond_the_limit_are_counted_and_not_drawn() -> None:
    report = samples.empty()
    for number in range(MOST_FIGURES + 3):
        piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": number + 1, "route": "owner"})
        report.sites.append(samples.planned("matmul_all_reduce", "all_reduce", piece, "m"))
    page = Page(render_html(report))
    assert len(page.named("figure")) == MOST_FIGURES
    assert "Not drawn: 3 more plans of this graph." in page.words


def test_sites_with_the_same_sketch_share_it() -> None:
    page = Page(render_html(samples.llama(3)))
    assert len(page.named("figure")) == 1
    assert page.words.count("layers.{0..2}.mlp.down_proj") == 2, "in the table, and at the shared sketch"


def test_a_kept_site_is_not_drawn() -> None:
    report = samples.empty()
    report.sites = [samples.planned("matmul_all_reduce", "all_reduce", samples.CHEAP, "m", status="kept")]
    report.sites[0].decision = Decision("kept", "analytic", [samples.CHEAP], [Reason("too_small", "140 us")])
    assert not Page(render_html(report)).named("figure")

"""The page: stands alone, runs nothing that a graph brought along, marks what changed, stays usable when large."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import Matmul
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.report.html.diff import CONTEXT
from overlap_inductor.report.html.diff import merge
from overlap_inductor.report.html.diff import render_diff
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.html.timeline import MOST_STEPS
from overlap_inductor.report.html.timeline import Bar
from overlap_inductor.report.html.timeline import sketch
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport
from tests.unit import sample_reports as samples

VOID = {"meta", "input", "br", "link", "img"}
ALL = [samples.llama(3), samples.block(), samples.empty(), samples.hostile()]


class Page(HTMLParser):
    """Collects a page's elements and text; complains about tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.words = ""
        self.feed(html)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} closes nothing")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize("report", ALL)
def test_page_is_well_formed(report: OverlapReport) -> None:
    assert Page(render_html(report)).problems == []


@pytest.mark.parametrize("report", ALL)
def test_page_loads_nothing(report: OverlapReport) -> None:
    """Catches a script, style, font or image from elsewhere: the page is opened on machines without a network."""
    html = render_html(report)
    page = Page(html)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import", html)
    assert any("default-src 'none'" in (m.get("content") or "") for m in page.named("meta"))


def test_markup_in_names_is_text() -> None:
    """Catches one missing escape: every free text of this report holds a script element."""
    html = render_html(samples.hostile())
    page = Page(html)
    assert len(page.named("script")) == 1, "only the page's own"
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
    assert "Sketch, from estimates" in words


def test_links_into_the_graph_lead_to_a_line() -> None:
    """Catches an anchor for a site that the graph does not name, and a link without its line."""
    page = Page(render_html(samples.llama(2)))
    links = [a["href"] for a in page.named("a") if (a.get("href") or "").startswith("#line-")]
    identities = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(links) == 1, "only lm_head's id stands in the sample's graph"
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
    page = Page(render_diff("a\nb\nc\n", "a\nx\nc\nd\n", {}))
    assert (len(page.named("del")), len(page.named("ins"))) == (1, 2)
    assert sum("data-change" in attributes for _, attributes in page.elements) == 2, (
        "two runs of changes to step through"
    )


def test_unchanged_runs_are_folded_and_lose_no_line() -> None:
    before = [f"line {i}" for i in range(100)]
    after = [*before[:50], "new", *before[50:]]
    page = Page(render_diff("\n".join(before), "\n".join(after), {}))
    assert len(page.named("details")) == 2
    assert f"{50 - CONTEXT} unchanged lines" in page.words
    for line in after:
        assert line in page.words


def test_five_thousand_lines_render_in_seconds() -> None:
    """Catches a quadratic comparison or search: dumps are written while a model compiles."""
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


def _site(pattern: str, world_size: int, piece: PlanPiece) -> SiteReport:
    collective = Collective("x", tuple(range(world_size)), "0", "bfloat16")
    facts = SiteFacts("id", pattern, "m", collective, (Matmul("mm", 8, 8, 8, "bfloat16"),))
    return SiteReport(facts, Decision("overlapped", "forced", [piece]))


PATTERNS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("world_size", [2, 3, 8, 1024])
@pytest.mark.parametrize(
    "estimate", [{"matmul": 600.0, "collective": 380.0}, {"matmul": 10.0, "collective": 500.0}, {}]
)
def test_sketch_does_the_same_work_in_less_time(pattern: str, world_size: int, estimate: dict[str, float]) -> None:
    """Catches a sketch that drops or invents work, runs two things on one lane at once, or promises the impossible."""
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 4}, estimate_us=estimate)
    drawing = sketch(_site(pattern, world_size, piece), piece)
    matmul, collective = estimate.get("matmul", 1.0), estimate.get("collective", 1.0)
    for bars in (drawing.serial, drawing.overlapped):
        assert _work(bars, "matmul") == pytest.approx(matmul)
        assert _work(bars, "transfer") == pytest.approx(collective)
        for lane in ("matmul", "transfer"):
            ordered = sorted((b for b in bars if b.lane == lane), key=lambda b: b.start)
            assert all(a.end <= b.start + 1e-6 for a, b in zip(ordered, ordered[1:]))
    end = max(bar.end for bar in drawing.overlapped)
    assert max(matmul, collective) - 1e-6 <= end < matmul + collective
    assert drawing.length == pytest.approx(matmul + collective)
    assert drawing.estimated == bool(estimate)
    assert len(drawing.overlapped) <= 3 * MOST_STEPS


def _work(bars: tuple[Bar, ...], lane: str) -> float:
    return sum(bar.end - bar.start for bar in bars if bar.lane == lane)


def test_a_sketch_without_estimates_says_so() -> None:
    report = samples.empty(before="x", after="y")
    report.sites = [_site("matmul_all_reduce", 2, PlanPiece("ring", "p2p", parameters={"sub_chunks": 2}))]
    report.sites[0].decision.plan = [PlanPiece("ring", "p2p", parameters={"sub_chunks": 2})]
    assert "Nothing was estimated for this site" in Page(render_html(report)).words

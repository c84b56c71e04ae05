# SPDX-License-Identifier: Apache-2.0
"""The short forms of a report: ``str``, ``repr`` and the table for notebooks."""

from __future__ import annotations

import html

import pytest

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.report import totals
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport
from overlap_inductor.report.text import render_text
from overlap_inductor.switch.explain import Explanation
from tests.support.html_page import Page
from tests.unit import sample_reports as samples


def test_str_is_the_headline_the_total_and_the_first_rows() -> None:
    assert str(samples.llama(80)) == (
        "graph 0_0 inference, 161 sites found: 160 overlapped, 1 refused; 80 near misses\n"
        "  estimated 214.72 ms -> 144.24 ms, 1.49x (overlapped sites together, at the example's sizes)\n"
        "  layers.{0..79}.self_attn.o_proj  80 x matmul_all_reduce  overlapped: ring/p2p S=4 (tokens >= 512)\n"
        "  layers.{0..79}.mlp.down_proj     80 x matmul_all_reduce  overlapped: ring/p2p S=4 (tokens >= 512)\n"
        "  lm_head                          1 x matmul_all_reduce   refused: other_users"
    )
    assert str(samples.every_schedule()).endswith("and 5 more rows; to_text() has all")
    assert str(samples.empty()) == "graph 0_0 inference, no sites found"


def test_repr_is_one_line() -> None:
    assert repr(samples.block()) == "<OverlapReport graph 1_0 forward, 1 site found: 1 kept>"


def test_a_report_renders_itself_whole() -> None:
    report = samples.llama(2)
    assert report.to_text() == render_text(report)
    assert report.to_html().startswith("<!doctype html>")


@pytest.mark.parametrize("report", [samples.llama(3), samples.empty(), samples.hostile(), samples.every_schedule()])
def test_a_notebook_shows_a_fragment(report: OverlapReport) -> None:
    html = report._repr_html_()
    page = Page(html)
    assert page.problems == []
    assert not {"html", "script", "style", "img"} & {tag for tag, _ in page.elements}
    assert len(html) < 10_000, "compact"
    words = " ".join(page.words.split())
    assert all(" ".join(site.facts.module.split()) in words for site in report.sites[-1:] if len(report.sites) < 8)


def test_an_explanation_shows_its_reports_in_three_forms() -> None:
    both = Explanation([samples.llama(2), samples.block()])
    total = totals.line_of_all(both.reports)
    assert total.startswith("total of 6 sites of 2 graphs: estimated ")
    assert str(both) == f"{samples.llama(2)}\n{samples.block()}\n{total}"
    both_tables = samples.llama(2)._repr_html_() + samples.block()._repr_html_()
    assert both._repr_html_() == f"{both_tables}<p>{html.escape(total)}</p>"
    assert both.to_text() == f"{render_text(samples.llama(2))}\n{render_text(samples.block())}\n{total}\n"
    for text in (str(Explanation([])), Explanation([])._repr_html_(), Explanation([]).to_text()):
        assert text.startswith("No graph was compiled: ")


def test_totals_add_up_and_say_slower() -> None:
    report = samples.empty(
        sites=[samples.planned(*samples.PIECES[name], name) for name in ("ring scatter", "ring slower")]
    )
    assert totals.of_report(report) == totals.Times(2684.0, 2512.0)
    assert totals.line(report).startswith("estimated 2684 us -> 2512 us, 1.07x (overlapped sites together")
    del report.sites[0]
    assert totals.line(report).startswith("estimated 1342 us -> 1610 us, 1.20x slower (")


def test_a_total_needs_an_estimate_of_every_site() -> None:
    report = samples.llama(1)
    report.sites[0].decision = Decision(
        "overlapped", "forced", [PlanPiece("ring", "p2p", (0, None), {"route": "owner"})]
    )
    assert totals.of_report(report) is None and totals.line(report) == ""
    assert totals.of_report(samples.block()) is None, "nothing is overlapped"


def test_of_several_pieces_the_fastest_serves_the_example() -> None:
    pieces = [samples.KEEP, PlanPiece("ring", "p2p", (512, None), {}, {"keep": 50.0, "ring": 80.0})]
    assert totals.of_decision(Decision("overlapped", "analytic", pieces)) == totals.Times(50.0, 50.0)
    assert totals.of_decision(Decision("overlapped", "forced", pieces[1:])) == totals.Times(50.0, 80.0)


def test_the_total_of_all_graphs_counts_kept_sites_as_written() -> None:
    """Without kept sites, the gain would look larger."""
    kept = Decision("kept", "analytic", [PlanPiece("keep", None, (0, None), {}, {"keep": 1000.0, "ring": 1100.0})])
    moved = Decision(
        "overlapped", "analytic", [PlanPiece("ring", "p2p", (0, None), {}, {"keep": 3000.0, "ring": 2000.0})]
    )
    refused = Decision("refused", "analytic", [PlanPiece("keep")])

    def graph(*decisions: Decision) -> OverlapReport:
        facts = samples.llama(1).sites[0].facts
        return samples.empty(sites=[SiteReport(facts, decision) for decision in decisions])

    assert totals.line_of_all([graph(kept, moved), graph(moved)]) == (
        "total of 3 sites of 2 graphs: estimated 7000 us -> 5000 us, 1.40x (28.6 % less)"
    )
    assert totals.line_of_all([graph(moved, refused)]) == (
        "total of 2 sites of 1 graph: estimated 3000 us -> 2000 us, 1.50x (33.3 % less); not counted: 1 site without an"
        " estimate"
    )
    assert totals.line_of_all([graph(kept)]).endswith("estimated 1000 us -> 1000 us, 1.00x")
    assert totals.line_of_all([graph(refused)]) == "total of 1 site of 1 graph: no site has an estimate"
    assert totals.line_of_all([graph()]) == totals.line_of_all([]) == ""


def test_times_of_nothing_have_no_ratio() -> None:
    assert totals.Times(0.0, 12.0).text() == "0.0 us -> 12.0 us"


def test_a_small_difference_is_not_shown_as_none() -> None:
    assert totals.Times(4394, 4412).ratio == "1.004x slower"
    assert totals.Times(4404, 4394).ratio == "1.002x"
    assert totals.Times(4394, 4394).ratio == "1.00x"

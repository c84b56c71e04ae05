# SPDX-License-Identifier: Apache-2.0
"""A timeline shows all of the matmul's time, one bar at a time on each lane, and ends at its printed estimate."""

from __future__ import annotations

import dataclasses
import re

import pytest

from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import Matmul
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.report import words
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.html.figure import PlacedRow
from overlap_inductor.report.html.figure import figures
from overlap_inductor.report.html.steps import Bar
from overlap_inductor.report.html.timeline import MOST_STEPS
from overlap_inductor.report.html.timeline import sketch
from tests.unit import sample_reports as samples

ROUTES = {
    "all_gather_matmul": ("ring", "all_gather"),
    "matmul_reduce_scatter": ("owner", "reduce_scatter"),
    "matmul_all_reduce": ("owner", "all_reduce"),
    "matmul_all_gather": ("broadcast", "all_gather"),
    "matmul_all_to_all": ("direct", "all_to_all"),
    "all_to_all_matmul": ("direct", "all_to_all"),
    "all_to_all_experts": ("direct", "all_to_all"),
    "embedding_all_to_all": ("direct", "all_to_all"),
    "all_gather_attention": ("ring", "all_gather"),
}
"""For each pattern that a ring computes: the ring's route, and the kind of the pattern's collective."""


def facts_of(pattern: str, world_size: int) -> SiteFacts:
    kind = ROUTES[pattern][1]
    reduce_op = None if kind in ("all_gather", "all_to_all") else "sum"
    collective = Collective(kind, tuple(range(world_size)), "0", "bfloat16", reduce_op=reduce_op)
    return SiteFacts("id", pattern, "m", collective, (Matmul("mm", 8, 8, 8, "bfloat16"),))


def work(bars: tuple[Bar, ...], lane: str) -> float:
    return sum(bar.end - bar.start for bar in bars if bar.lane == lane)


def check_lanes(bars: tuple[Bar, ...]) -> None:
    for lane in ("matmul", "transfer", "fixed"):
        ordered = sorted((b for b in bars if b.lane == lane), key=lambda b: b.start)
        assert all(b.start <= b.end for b in ordered)
        assert all(a.end <= b.start + 1e-6 for a, b in zip(ordered, ordered[1:]))


def test_the_samples_have_every_schedule() -> None:
    assert {piece.schedule for _, _, piece in samples.PIECES.values()} == {s.name for s in SCHEDULES}


@pytest.mark.parametrize("name", samples.PIECES)
def test_rows_end_at_their_estimates(name: str) -> None:
    pattern, kind, piece = samples.PIECES[name]
    drawing = sketch(samples.planned(pattern, kind, piece, "m").facts, piece)
    assert drawing.estimated
    for row, schedule in ((drawing.written, "keep"), (drawing.planned, piece.schedule)):
        assert row.end == piece.estimate_us[schedule]
        assert max(bar.end for bar in row.bars) == pytest.approx(row.end, abs=1e-6)
        assert min(bar.start for bar in row.bars) == 0.0
        check_lanes(row.bars)
        assert work(row.bars, "matmul") == pytest.approx(piece.estimate_us["matmul"])


@pytest.mark.parametrize("name", samples.PIECES)
def test_the_page_places_rows_as_the_axis_says(name: str) -> None:
    pattern, kind, piece = samples.PIECES[name]
    report = samples.empty(sites=[samples.planned(pattern, kind, piece, "m")])
    (figure,), left_out = figures(group_sites(report))
    assert left_out == 0 and figure.unit == "us" and figure.ticks[0] == (0.0, "0") and len(figure.ticks) > 3
    position, text = figure.ticks[-1]
    us_in_percent = position / float(text)
    for row, schedule in zip(figure.rows, ("keep", piece.schedule)):
        assert _end(row) / us_in_percent == pytest.approx(piece.estimate_us[schedule], rel=1e-6)
        assert row.total == words.microseconds(piece.estimate_us[schedule])
    box = figure.rows[1].verdict
    assert box is not None and box.kind == ("slower" if name == "ring slower" else "saved")
    assert box.left == pytest.approx(min(map(_end, figure.rows)))
    assert box.left + box.width == pytest.approx(max(map(_end, figure.rows)))


def _end(row: PlacedRow) -> float:
    return max(bar.left + bar.width for _, bars in row.lanes for bar in bars)


@pytest.mark.parametrize("pattern", ROUTES)
@pytest.mark.parametrize("world_size", [2, 3, 8, 1024])
@pytest.mark.parametrize("estimate", [{"matmul": 600.0, "collective": 380.0}, {"matmul": 10.0, "collective": 500.0}])
@pytest.mark.parametrize("share", [0.7, 0.99, 1.3])
def test_steps_do_the_work(pattern: str, world_size: int, estimate: dict[str, float], share: float) -> None:
    """The matmul's time must be complete, and steps on one lane must not overlap. The transfer may be
    drawn shorter than the collective only if no fixed cost is drawn."""
    keep = sum(estimate.values())
    total = max(share * keep, 1.01 * max(estimate.values()))
    parameters = {"sub_chunks": 4, "route": ROUTES[pattern][0]}
    piece = PlanPiece("ring", "p2p", parameters=parameters, estimate_us={**estimate, "keep": keep, "ring": total})
    drawing = sketch(facts_of(pattern, world_size), piece)
    assert drawing.planned.end == total
    assert work(drawing.planned.bars, "matmul") == pytest.approx(estimate["matmul"])
    sent = work(drawing.planned.bars, "transfer")
    assert sent == pytest.approx(estimate["collective"]) or sent < estimate["collective"] and not drawing.planned.fixed
    check_lanes(drawing.planned.bars)
    assert len(drawing.planned.bars) <= 6 * MOST_STEPS


@pytest.mark.parametrize("pattern", ROUTES)
@pytest.mark.parametrize("world_size", [2, 8])
def test_without_estimates_the_plan_takes_less_time_than_the_graph_as_written(pattern: str, world_size: int) -> None:
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 4, "route": ROUTES[pattern][0]})
    drawing = sketch(facts_of(pattern, world_size), piece)
    assert not drawing.estimated
    assert drawing.written.end == 2.0 and 1.0 <= drawing.planned.end < 2.0
    assert work(drawing.planned.bars, "transfer") == pytest.approx(1.0)
    assert drawing.planned.fixed == 0.0


@pytest.mark.parametrize("pattern", ["all_gather_matmul", "matmul_all_gather"])
def test_a_patterns_name_says_what_comes_first(pattern: str) -> None:
    estimate = {"keep": 30.0, "matmul": 10.0, "collective": 20.0, "one": 24.0}
    drawing = sketch(facts_of(pattern, 2), PlanPiece("one", "p2p", estimate_us=estimate))
    first = min(drawing.written.bars, key=lambda bar: bar.start)
    assert first.lane == ("transfer" if pattern == "all_gather_matmul" else "matmul")


def test_a_transfer_without_a_matmul_beside_it_is_exposed() -> None:
    estimate = {"keep": 30.0, "matmul": 10.0, "collective": 20.0, "one": 24.0}
    drawing = sketch(facts_of("matmul_all_reduce", 2), PlanPiece("one", "p2p", estimate_us=estimate))
    assert drawing.written.exposed == 20.0
    assert (drawing.planned.exposed, drawing.planned.fixed) == (10.0, 4.0)


def test_a_transfer_after_the_matmul_is_exposed_and_ends_at_the_estimate() -> None:
    pattern, kind, piece = samples.PIECES["small message"]
    drawing = sketch(samples.planned(pattern, kind, piece, "m").facts, piece)
    assert drawing.planned.exposed == pytest.approx(655.0 - 644.0)
    assert drawing.planned.fixed == 0.0 and work(drawing.planned.bars, "transfer") == drawing.planned.exposed


def test_bars_end_at_an_estimate_below_the_matmul_alone() -> None:
    estimate = {"keep": 30.0, "matmul": 10.0, "collective": 20.0, "one": 8.0}
    drawing = sketch(facts_of("matmul_all_reduce", 2), PlanPiece("one", "p2p", estimate_us=estimate))
    assert max(bar.end for bar in drawing.planned.bars) == pytest.approx(8.0)


@pytest.mark.parametrize("keep, unit", [(9700.0, "us"), (10400.0, "ms"), (1.2e6, "s")])
def test_the_axis_has_the_unit_of_the_numbers_beside_it(keep: float, unit: str) -> None:
    """All times of a figure have one unit, even near the value at which units change."""
    estimate = {"keep": keep, "matmul": 0.4 * keep, "collective": 0.6 * keep, "ring": 0.8 * keep}
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 4, "route": "owner"}, estimate_us=estimate)
    report = samples.empty(sites=[samples.planned("matmul_all_reduce", "all_reduce", piece, "m")])
    (figure,), _ = figures(group_sites(report))
    assert figure.unit == unit
    assert [row.total.split()[1] for row in figure.rows] == [unit, unit]
    assert re.fullmatch(rf"estimated [\d.]+ {unit} \u2192 [\d.]+ {unit}, 1.25x", figure.times)
    position, text = figure.ticks[-1]
    assert _end(figure.rows[0]) / position * float(text) == pytest.approx(keep / {"us": 1, "ms": 1e3, "s": 1e6}[unit])


def test_long_timelines_are_in_milliseconds() -> None:
    estimate = {"keep": 30000.0, "matmul": 10000.0, "collective": 20000.0, "ring": 24000.0}
    piece = PlanPiece("ring", "p2p", parameters={"sub_chunks": 4, "route": "owner"}, estimate_us=estimate)
    report = samples.empty(sites=[samples.planned("matmul_all_reduce", "all_reduce", piece, "m")])
    (figure,), _ = figures(group_sites(report))
    assert figure.unit == "ms"
    assert [text for _, text in figure.ticks] == ["0", "5", "10", "15", "20", "25", "30"]
    assert all(re.fullmatch(r"[\d.]+", text) for _, text in figure.ticks)


@pytest.mark.parametrize(("kind", "first"), [("embedding_bag", "matmul"), ("embedding_gradient", "transfer")])
def test_the_site_as_written_runs_lookups_before_their_exchange(kind: str, first: str) -> None:
    """The backward receives the gradients before it computes. Schedule ``fused`` has no route."""
    facts = facts_of("embedding_all_to_all", 2)
    facts = dataclasses.replace(facts, matmuls=(dataclasses.replace(facts.matmuls[0], kind=kind),))
    piece = PlanPiece("fused", None, estimate_us={"matmul": 60.0, "collective": 40.0, "keep": 100.0, "fused": 70.0})
    assert [bar.lane for bar in sketch(facts, piece).written.bars][0] == first

# SPDX-License-Identifier: Apache-2.0
"""The report as data and as text: schema, round trip, grouping, and whole texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.report import words as report_words
from overlap_inductor.report.groups import common_names
from overlap_inductor.report.groups import group_near_misses
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.groups import ranges
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from tests.support.golden import check_golden
from tests.unit import sample_reports as samples


@pytest.mark.parametrize(
    "report", [samples.llama(3), samples.block(), samples.empty(), samples.hostile(), samples.broken()]
)
def test_round_trip_restores_the_whole_report(report: OverlapReport) -> None:
    """If a field were not read back, the report of a cached graph would lack it."""
    restored = OverlapReport.from_json(report.to_json(graphs=True))
    assert restored == report
    assert restored.counters() == report.counters()


def test_another_schema_version_is_refused() -> None:
    text = samples.block().to_json(graphs=True).replace('"schema_version": 1', '"schema_version": 2')
    with pytest.raises(ValueError, match="schema version"):
        OverlapReport.from_json(text)


def test_sites_json_has_the_fields_of_the_contract() -> None:
    """Other tools read ``sites.json``."""
    value = json.loads(samples.llama(1).to_json())
    assert {
        "schema_version",
        "overlap_inductor",
        "torch",
        "mode",
        "phase",
        "world_size",
        "sites",
        "near_misses",
    } <= value.keys()
    assert value["schema_version"] == 1
    assert "before" not in value, "the graphs have their own files"
    site = value["sites"][0]
    assert {"id", "pattern", "module", "derived_from", "collective", "matmuls", "decision"} <= site.keys()
    assert {"kind", "ranks", "mesh_dim", "dim", "role", "reduce_op", "bytes"} <= site["collective"].keys()
    assert site["collective"]["ranks"] == list(range(8))
    assert {"kind", "m", "n", "k", "dtype"} <= site["matmuls"][0].keys()
    assert site["matmuls"][0]["m"] == "s0"
    assert {"status", "source", "plan", "reasons"} <= site["decision"].keys()
    piece = site["decision"]["plan"][1]
    assert piece["tokens"] == [512, None]
    assert {"schedule", "transport", "parameters", "estimate_us"} <= piece.keys()
    miss = value["near_misses"][0]
    assert {"code", "text"} == miss["reason"].keys()
    assert miss["collective"]["kind"] == "all_gather_into_tensor"


def test_counters_are_those_of_the_contract() -> None:
    counters = samples.llama(2).counters()
    assert counters["sites_found"] == 5
    assert counters["sites_overlapped"] == 4
    assert counters["schedule.ring"] == 4
    assert counters["reason.other_users"] == 1
    assert counters["reason.op_between"] == 2


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 8, 1]) == "0..3,7..9"
    assert ranges([5]) == "5"


def test_a_common_name_never_names_a_layer_that_is_not_there() -> None:
    """Two numbers vary, and one combination is missing, so ``layers.{0..1}.experts.{0..1}.w`` would be wrong."""
    names = [f"layers.{i}.experts.{j}.w" for i, j in [(0, 0), (0, 1), (1, 0)]]
    assert [name for name, _ in common_names(names)] == ["layers.0.experts.{0..1}.w", "layers.1.experts.0.w"]
    full = [f"layers.{i}.experts.{j}.w" for i in range(4) for j in range(2)]
    assert common_names(full) == [("layers.{0..3}.experts.{0..1}.w", list(range(8)))]


def test_names_that_end_in_a_digit_are_not_layers() -> None:
    assert [name for name, _ in common_names(["mlp.fc1", "mlp.fc2"])] == ["mlp.fc1", "mlp.fc2"]


def test_layers_with_other_plans_sizes_or_values_in_reasons_stay_apart() -> None:
    report = samples.empty()
    report.sites = [samples.site(f"layers.{i}.mlp.down_proj", samples.overlapped()) for i in range(3)]
    report.sites[1] = samples.site(
        "layers.1.mlp.down_proj", Decision("overlapped", "forced", [PlanPiece("ring", "p2p")])
    )
    report.sites[2] = samples.site("layers.2.mlp.down_proj", samples.overlapped(), k=128)
    assert [g.module for g in group_sites(report)] == [f"layers.{i}.mlp.down_proj" for i in range(3)]

    report.sites = [
        samples.site(f"layers.{i}.x", Decision("kept", "analytic", [], [Reason("too_small", f"{us} us")]))
        for i, us in enumerate([10, 10, 11])
    ]
    assert [g.module for g in group_sites(report)] == ["layers.{0..1}.x", "layers.2.x"]


def test_node_names_in_reasons_do_not_keep_layers_apart() -> None:
    """The layers' reasons differ only in the names of nodes. The layers must share one row."""
    report = samples.empty()
    for i, node in enumerate(["mm", "mm_1", "mm_27"]):
        reason = Reason("other_users", f"{node} is also used by add_{i}")
        report.sites.append(samples.site(f"layers.{i}.x", Decision("refused", "analytic", [], [reason])))
    assert [(g.module, len(g.sites)) for g in group_sites(report)] == [("layers.{0..2}.x", 3)]


def test_groups_hold_each_site_once_and_as_many_near_misses_as_the_report() -> None:
    report = samples.llama(13)
    grouped = [s.facts.id for g in group_sites(report) for s in g.sites]
    assert sorted(grouped) == sorted(s.facts.id for s in report.sites)
    assert sum(len(g.misses) for g in group_near_misses(report)) == 13


def test_eighty_layers_take_as_many_lines_as_two() -> None:
    few, many = render_text(samples.llama(2)), render_text(samples.llama(80))
    assert len(few.splitlines()) == len(many.splitlines())
    assert "layers.{0..79}.mlp.down_proj" in many


def test_plan_parameters_and_estimates_are_shown_per_token_range() -> None:
    text = render_text(samples.llama(2))
    assert re.search(r"tokens <= 511 +keep", text)
    assert re.search(
        r"tokens >= 512 +ring/p2p S=4  min_rows=512 .*\n +estimated ring 902 us, keep 1342 us \(matmul 644 us", text
    )


def test_report_mode_does_not_promise_a_plan_that_mode_on_would_not_run() -> None:
    """A report without sites mentions no plan. With a stretch, mode ``on`` would first rewrite the stretch and then
    find other sites. So mode ``report`` must not promise a plan."""
    report = samples.empty(mode="report")
    assert "\nmode report: the graph was not changed\n" in report.to_text()
    reason = Reason("report_mode", "leaves the graph alone")
    report.sites = [samples.site("lm_head", Decision("kept", "analytic", [samples.RING], [reason]))]
    report.stretches = [stretch(status="kept", reasons=(reason,))]
    assert "the graph was not changed; mode on would first rewrite a stretch, so the graph would" in report.to_text()


def stretch(**fields: Any) -> StretchFacts:
    first = ("sequence_parallel-1a2b3c4d", "mlp", (0, 1), 64, 32, "bfloat16")
    counts = dict.fromkeys(("all_reduces", "scatters", "gathers", "sums", "gathered_again", "nodes"), 2)
    return StretchFacts(*first, **{**counts, "status": "rewritten", "source": "analytic", **fields})


@pytest.mark.parametrize(
    ("gathered_again", "words"),
    [
        (
            1,
            "1 of the all-gathers is repeated in the backward,"
            " so each rank saves only its own rows of the gathered tensor",
        ),
        (
            2,
            "2 of the all-gathers are repeated in the backward,"
            " so each rank saves only its own rows of the gathered tensors",
        ),
    ],
)
def test_a_rewritten_stretch_says_what_was_written(gathered_again: int, words: str) -> None:
    report = samples.empty()
    report.stretches = [stretch(gathered_again=gathered_again)]
    text = " ".join(report.to_text().split())
    assert "rewritten: 2 reduce-scatters, 2 all-gathers, 2 all-reduces of sums or extrema over tokens;" in text
    assert words in text


def test_report_mode_says_that_the_graph_was_left_alone() -> None:
    decision = Decision("kept", "analytic", [samples.RING], [Reason("report_mode", "leaves the graph alone")])
    report = samples.empty(mode="report")
    report.sites = [samples.site("lm_head", decision)]
    text = render_text(report)
    assert "the graph was not changed" in text
    assert "would be overlapped: ring/p2p S=4" in text


def test_units() -> None:
    assert [report_words.microseconds(v) for v in (3.14, 140.2, 12345.0, 2.5e6)] == [
        "3.1 us",
        "140 us",
        "12.35 ms",
        "2.50 s",
    ]
    assert [report_words.microseconds(v, 12345.0) for v in (12345.0, 7212.0, 99.0)] == [
        "12.35 ms",
        "7.21 ms",
        "99.0 us",
    ]
    assert [report_words.microseconds(v, 1.2e6) for v in (1.2e6, 9.5e5, 5e4)] == ["1.20 s", "0.95 s", "50.00 ms"]
    assert report_words.microseconds(7212.0, 9999.0) == "7212 us"
    assert [report_words.size_in_bytes(v) for v in (512, 4 << 20, 3 << 30, "2*s0")] == [
        "512 B",
        "4.0 MiB",
        "3.0 GiB",
        "2*s0 B",
    ]
    pieces = [(0, None), (1, 512), (513, 4096), (4097, None)]
    assert [report_words.tokens(PlanPiece("keep", None, p)) for p in pieces] == [
        "any",
        "<= 512",
        "513 to 4096",
        ">= 4097",
    ]


def test_text_of_llama() -> None:
    check_golden(render_text(samples.llama(80)), "report/llama.txt")


def test_text_of_block() -> None:
    check_golden(render_text(samples.block()), "report/block.txt")


def test_text_of_nothing_found() -> None:
    check_golden(render_text(samples.empty()), "report/nothing_found.txt")

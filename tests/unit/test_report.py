"""The report as data and as text: contract schema, round trip, grouping, goldens."""

from __future__ import annotations

import json
import re

import expecttest
import pytest

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.report import words as report_words
from overlap_inductor.report.groups import common_names
from overlap_inductor.report.groups import group_near_misses
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.groups import ranges
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from tests.unit import sample_reports as samples


@pytest.mark.parametrize("report", [samples.llama(3), samples.block(), samples.empty(), samples.hostile()])
def test_round_trip_restores_the_whole_report(report: OverlapReport) -> None:
    """Catches a field that is written and not read back (a cached graph would then show another report)."""
    restored = OverlapReport.from_json(report.to_json(graphs=True))
    assert restored == report
    assert restored.counters() == report.counters()


def test_another_schema_version_is_refused() -> None:
    text = samples.block().to_json(graphs=True).replace('"schema_version": 1', '"schema_version": 2')
    with pytest.raises(ValueError, match="schema version"):
        OverlapReport.from_json(text)


def test_sites_json_has_the_fields_of_the_contract() -> None:
    """Catches a renamed or dropped field: tools outside read this file."""
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
    assert "before" not in value, "the graphs are files of their own"
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
    assert counters["reason.result_used_elsewhere"] == 1
    assert counters["reason.op_between"] == 2


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 8, 1]) == "0..3,7..9"
    assert ranges([5]) == "5"


def test_a_common_name_never_claims_a_layer_that_is_not_there() -> None:
    """Catches ``layers.{0,1}.experts.{0,1}`` for three of the four: two numbers vary and one combination is missing."""
    names = [f"layers.{i}.experts.{j}.w" for i, j in [(0, 0), (0, 1), (1, 0)]]
    assert [name for name, _ in common_names(names)] == ["layers.0.experts.{0..1}.w", "layers.1.experts.0.w"]
    full = [f"layers.{i}.experts.{j}.w" for i in range(4) for j in range(2)]
    assert common_names(full) == [("layers.{0..3}.experts.{0..1}.w", list(range(8)))]


def test_names_that_end_in_a_digit_are_not_layers() -> None:
    assert [name for name, _ in common_names(["mlp.fc1", "mlp.fc2"])] == ["mlp.fc1", "mlp.fc2"]


def test_layers_that_differ_in_anything_stay_apart() -> None:
    """Catches grouping by name alone: layer 1 has another plan, layer 2 another size, layer 3 another reason value."""
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
    """Catches 80 rows where every layer's reason names its own node (mm, mm_1, mm_2)."""
    report = samples.empty()
    for i, node in enumerate(["mm", "mm_1", "mm_27"]):
        reason = Reason("other_users", f"{node} is also used by add_{i}")
        report.sites.append(samples.site(f"layers.{i}.x", Decision("refused", "analytic", [], [reason])))
    assert [(g.module, len(g.sites)) for g in group_sites(report)] == [("layers.{0..2}.x", 3)]


def test_every_site_and_near_miss_is_in_exactly_one_group() -> None:
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


def test_report_mode_says_that_the_graph_was_left_alone() -> None:
    decision = Decision("kept", "analytic", [samples.RING], [Reason("report_mode", "leaves the graph alone")])
    report = samples.empty(mode="report")
    report.sites = [samples.site("lm_head", decision)]
    text = render_text(report)
    assert "the graph was left as it was" in text
    assert "kept: report_mode, would be ring/p2p S=4" in text


def test_units() -> None:
    assert [report_words.microseconds(v) for v in (3.14, 140.2, 12345.0, 2.5e6)] == [
        "3.1 us",
        "140 us",
        "12.35 ms",
        "2.50 s",
    ]
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


class TestGoldens(expecttest.TestCase):
    """What a user reads, whole. ``EXPECTTEST_ACCEPT=1`` rewrites them."""

    maxDiff = None

    def test_llama(self) -> None:
        self.assertExpectedInline(
            render_text(samples.llama(80)),
            """\
overlap_inductor 0.1.0, torch 2.13.0
graph 0_0, inference, world size 8, mode on
161 sites found: 160 overlapped, 1 refused; 80 near misses
plan 5ad3c0de (equal on every rank)

requested and effective
-----------------------
switch             requested       effective
mode               on              on
schedule           auto            keep (1), ring (160)
transport          auto            p2p
patterns           all 4           matmul_all_reduce
numerics           preserve        preserve
tune               off             off
ring_direction     unidirectional  straight to the owner
sub_chunks         4               4
step_node_budget   3000            3000
workspace_limit    4096            4096
max_tokens         16384           16384
replay             on              on
agreement_timeout  300             300

sites
-----
module                           sites  pattern            matmul [M x N x K]          outcome
layers.{0..79}.self_attn.o_proj  80     matmul_all_reduce  mm [s0 x 8192 x 1024] bf16  overlapped: ring/p2p S=4 \
(tokens >= 512)
layers.{0..79}.mlp.down_proj     80     matmul_all_reduce  mm [s0 x 8192 x 3584] bf16  overlapped: ring/p2p S=4 \
(tokens >= 512)
lm_head                          1      matmul_all_reduce  mm [s0 x 8192 x 3584] bf16  refused: result_used_elsewhere

overlapped: its transfers run under the matmuls in pieces, or in a faster kernel behind them (small_message)
refused: stays as it was: overlapping it is not supported, or was not shown to keep the result

reasons
-------
lm_head (matmul_all_reduce): refused
  result_used_elsewhere: lm_head: the matmul's result has 2 users, expected only the collective

plan by token count (rows of the rank's own matmul)
---------------------------------------------------
layers.{0..79}.self_attn.o_proj
layers.{0..79}.mlp.down_proj
  all_reduce(sum) of 16384*s0 B bf16 over 8 ranks (tp); decided by: estimate from the shipped machine profile
  tokens <= 511  keep
  tokens >= 512  ring/p2p S=4  min_rows=512 route=owner sub_chunks=4 unrolled=False
    estimated ring 902 us, keep 1342 us (matmul 644 us, collective 698 us)

near misses: collectives that are no site
-----------------------------------------
layers.{0..79}.norm: all_gather_into_tensor on dim 1 (M) of 4.0 MiB fp32 over 2 ranks, 80 times
  op_between: aten.relu stands between mm_0 and the collective and does not commute with it

notices
-------
- micro_pipeline_tp is on and ran first: the sites that it took are not listed here
""",
        )

    def test_block(self) -> None:
        self.assertExpectedInline(
            render_text(samples.block()),
            """\
overlap_inductor 0.1.0, torch 2.13.0
graph 1_0, forward, world size 2, mode on
1 site found: 1 kept

requested and effective
-----------------------
switch             requested       effective
mode               on              on
schedule           auto            keep
transport          auto            nothing overlapped
patterns           all 4           nothing overlapped
numerics           preserve        preserve
tune               off             off
ring_direction     unidirectional  nothing overlapped
sub_chunks         4               nothing overlapped
step_node_budget   3000            3000
workspace_limit    4096            4096
max_tokens         16384           16384
replay             on              on
agreement_timeout  300             300

sites
-----
module           sites  pattern            matmul [M x N x K]                 outcome
feed_forward.w1  1      all_gather_matmul  mm [2048 x 3584 x 8192] fp32 (x2)  kept: too_small

kept: could be overlapped, and stays as it was: estimated to be no faster, or asked for

No module name holds a layer number. If one block was compiled and is called several times (per-block compilation),
this one graph serves every call with the same code: count its sites once for each call.

reasons
-------
feed_forward.w1 (all_gather_matmul): kept
  too_small: estimated 140 us as a ring against 95 us as it is (matmul 60, collective 35)

plan by token count (rows of the rank's own matmul)
---------------------------------------------------
feed_forward.w1
  all_gather_into_tensor on dim 1 (M) of 4.0 MiB fp32 over 2 ranks; decided by: estimate from the shipped machine \
profile
  tokens any  keep
    estimated keep 95.0 us, ring 140 us (matmul 60.0 us, collective 35.0 us)
""",
        )

    def test_nothing_found(self) -> None:
        self.assertExpectedInline(
            render_text(samples.empty()),
            """\
overlap_inductor 0.1.0, torch 2.13.0
graph 0_0, inference, world size 8, mode on
no sites found

requested and effective
-----------------------
switch             requested       effective
mode               on              on
schedule           auto            nothing overlapped
transport          auto            nothing overlapped
patterns           all 4           nothing overlapped
numerics           preserve        preserve
tune               off             off
ring_direction     unidirectional  nothing overlapped
sub_chunks         4               nothing overlapped
step_node_budget   3000            3000
workspace_limit    4096            4096
max_tokens         16384           16384
replay             on              on
agreement_timeout  300             300
""",
        )

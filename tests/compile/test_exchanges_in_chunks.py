# SPDX-License-Identifier: Apache-2.0
"""All-to-alls beside matmuls, as one op of schedule ``chunked``: graphs, refusals and the choice of ``auto``."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked.cost import COST
from overlap_inductor.sites import sizes as site_sizes
from tests.compile import exchange_graphs as graphs
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")


SITES = {
    "fused_graph/sent_rows_in_chunks.txt": graphs.sent_rows,
    "fused_graph/sent_heads_in_chunks.txt": graphs.sent_heads,
    "fused_graph/received_rows_in_chunks.txt": graphs.received_rows,
    "fused_graph/contracted_heads_in_chunks.txt": graphs.contracted,
    "fused_graph/contracted_rows_in_chunks.txt": graphs.contracted_rows,
    "fused_graph/contracted_heads_and_gradient_in_chunks.txt": graphs.contracted_and_gradient,
}


@pytest.mark.parametrize("file", SITES)
def test_golden(file: str) -> None:
    """Nothing is copied before the exchange. Biases and weights are in the order of the slices. What arrives has the
    layout that its readers expect."""
    with fake_group(2):
        report = SITES[file]().run(schedule="chunked")
        check_golden(report.after, file)


@pytest.mark.parametrize("name", SITES)
def test_one_text_on_all_ranks(name: str) -> None:
    texts = set()
    for rank in (0, 7):
        with fake_group(8, rank):
            report = SITES[name]().run(schedule="chunked")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["chunked"], report.notices
            texts.add((report.before, report.after, report.plan_hash))
    assert len(texts) == 1


REFUSED = {
    "fp8": (graphs.scaled, "no schedule in chunks multiplies fp8 with scales in matmul_all_to_all"),
    "one bias for all columns": (graphs.one_bias_for_all_columns, "or an unsupported matmul or bias"),
    "bf16 sent as fp16": (graphs.sent_as_other_floats, "values sent as another dtype"),
    "uneven parts, sent": (
        graphs.uneven,
        "each rank's part has its own number of rows; a schedule in chunks sends equal",
    ),
    "uneven parts, received": (graphs.uneven_received, "each rank's part has its own number of rows"),
    "a sum": (graphs.summed, "2 matmuls are added before the all-to-all; a schedule in chunks computes only one"),
    "a contraction on the right": (
        graphs.contracted_on_the_right,
        "a schedule in chunks expects the ranks' slices side by side",
    ),
    "a contraction of narrow slices": (
        lambda: graphs.contracted(4),
        "each rank's slice of the contracted dim has 4 elements; a schedule in chunks expects a multiple of 8",
    ),
    "contracted heads of a dynamic sequence": (graphs.contracted_dynamic, "a size or stride is only known at run time"),
    "an activation": (graphs.activated, "an unsupported op between matmul and collective"),
    "fp32": (lambda: graphs.sent_rows(dtype=torch.float32), "multiplies fp16 or bf16 here, not torch.float32"),
    "narrow slices": (lambda: graphs.sent_heads(width=2), "rows of 16 and of 4 elements cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    make, text = REFUSED[name]
    with fake_group(2):
        (site,) = make().run(schedule="chunked").sites
    assert site.decision.status == "refused" and text in site.decision.reasons[0].text, site.decision.reasons


@pytest.mark.parametrize("pattern", ["matmul_all_to_all", "all_to_all_matmul"])
def test_a_token_count_that_changes(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """The op runs the plain collective below the count from which overlap pays, and above ``max_tokens``."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        made = HandGraph()
        inner, columns = (2048, 8192) if pattern == "matmul_all_to_all" else (8192, 2048)
        x, w = made.input(4096, inner, name="x", dtype=BF16, dynamic=[0]), operand(made, inner, columns)
        both = made.call(aten.cat.default, [x, x])
        y = (
            graphs.exchange(made, made.mm(both, w))
            if pattern == "matmul_all_to_all"
            else made.mm(graphs.exchange(made, both), w)
        )
        (site,) = made.output(y).run(schedule="auto", transport="copy_engine", max_tokens=16384).sites
    below, chunked, above = site.decision.plan
    assert (below.schedule, chunked.schedule, above.schedule) == ("keep", "chunked", "keep")
    assert 1024 <= chunked.tokens[0] <= 8192 and chunked.tokens[1] == 16384 == chunked.parameters["max_tokens"]


def test_an_empty_slice_is_planned_and_written() -> None:
    """The slice has no rows, so the op runs the plain collective."""
    with fake_group(2):
        report = graphs.sent_rows(rows=0).run(schedule="chunked")
    assert "chunked_matmul_all_to_all" in report.after, report.notices


def test_auto_chooses_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` chooses chunks only if they are estimated to be more than 25 % faster than the plain graph, because
    all-to-alls were not measured on 8 ranks. The estimate counts the copy out of the workspace."""
    machine = machine_for("cuda")
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine)
    found = {}
    with fake_group(8):
        for rows in (1, 256, 1024, 2048):
            for make in (graphs.sent_rows, graphs.received_rows):
                for inner in (512, 4096, 16384):
                    (site,) = make(rows, inner, 8192).run(schedule="auto", transport="copy_engine").sites
                    piece = site.decision.plan[0]
                    found[make, rows, inner] = piece.schedule, piece.estimate_us
    assert {schedule for schedule, _ in found.values()} == {"keep", "chunked"}
    for (make, rows, inner), (schedule, estimate) in found.items():
        if schedule == "chunked":
            assert estimate["chunked"] * MARGIN_UNMEASURED < estimate["keep"], (make, rows, inner)
        if make is graphs.sent_rows:
            wire, matmul = estimate["collective"] - machine.collective_seconds * 1e6, estimate["matmul"]
            copy = 2 * 7 * rows * 8192 * 2 / machine.memory_bytes * 1e6
            fixed = (COST.leg_seconds + 7 * COST.leg_peer_seconds) * 1e6
            expected = max(wire, matmul) + COST.exposed[1] * min(wire, matmul) + copy + fixed
            assert estimate["chunked"] == pytest.approx(expected, abs=0.3)
    assert found[graphs.sent_rows, 2048, 4096][0] == "chunked" and found[graphs.sent_rows, 1, 4096][0] == "keep"

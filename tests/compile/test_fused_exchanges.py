# SPDX-License-Identifier: Apache-2.0
"""All-to-alls beside matmuls, as one op of schedule ``fused``: graphs, refusals and the choice of ``auto``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.fused import cost
from overlap_inductor.lowerings.fused.schedule import FusedSchedule
from overlap_inductor.sites import sizes as site_sizes
from tests.compile import exchange_graphs as graphs
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.ulysses import UlyssesAttention

pytestmark = pytest.mark.usefixtures("reachable")

SITES = {
    "fused_graph/sent_rows.txt": graphs.sent_rows,
    "fused_graph/sent_heads.txt": graphs.sent_heads,
    "fused_graph/received_rows.txt": graphs.received_rows,
    "fused_graph/contracted.txt": lambda: graphs.contracted(64),
    "fused_graph/contracted_heads.txt": graphs.contracted_heads,
    "fused_graph/contracted_rows.txt": lambda: graphs.contracted_rows(64),
    "fused_graph/contracted_by_two.txt": lambda: graphs.contracted_by_two(64),
}


@pytest.mark.parametrize("file", SITES)
def test_golden(file: str) -> None:
    """Nothing is copied before the exchange. Biases and weights are in the order of the slices. What arrives has the
    layout that its readers expect."""
    with fake_group(2):
        report = SITES[file]().run(schedule="fused")
        check_golden(report.after, file)


@pytest.mark.parametrize("name", SITES)
def test_one_text_on_all_ranks(name: str) -> None:
    texts = set()
    for rank in (0, 7):
        with fake_group(8, rank):
            report = SITES[name]().run(schedule="fused")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["fused"], report.notices
            texts.add((report.before, report.after, report.plan_hash))
    assert len(texts) == 1


def test_a_ulysses_block() -> None:
    """Each exchange and its matmul become one kernel. In the backward of q, k and v, the matmul of the weight's
    gradient also reads what arrives. This matmul runs after the kernel."""
    with fake_group(2, 1):
        block = UlyssesAttention(256, 4, dist.group.WORLD).bfloat16()
        forward, backward = reports_of(block, torch.randn(2, 24, 256).bfloat16().requires_grad_(), schedule="fused")
    assert [s.decision.status for r in (forward, backward) for s in r.sites] == ["overlapped"] * 8
    assert forward.after.count("fused_matmul_all_to_all.default") == 3
    assert forward.after.count("fused_contracted_all_to_all_matmul.default") == 1
    assert backward.after.count("fused_matmul_all_to_all.default") == 1
    assert backward.after.count("fused_contracted_all_to_all_matmul.default") == 3
    assert [s.decision.plan[0].parameters.get("matmuls") for s in backward.sites] == [None] + ["1 of 2"] * 3


def _tiles_in(made: HandGraph) -> int:
    (site,) = made.run(schedule="fused").sites
    return int(json.loads(site.decision.plan[0].parameters["settings"])["column_tiles"])


def test_slices_do_not_depend_on_a_ranks_own_columns() -> None:
    """Ranks may have weights of different widths, but must send equally many slices. The number of slices depends on
    the number of column tiles. So the plan holds the number of column tiles, computed from rounded widths."""
    with fake_group(2):
        assert _tiles_in(graphs.received_rows(columns=2040)) == _tiles_in(graphs.received_rows(columns=2048))


@pytest.mark.parametrize("make", [graphs.sent_rows, graphs.received_rows])
def test_what_follows_stays_in_the_graph(make: Callable[..., HandGraph]) -> None:
    """The kernels have no epilogue for an all-to-all, so a pointwise op stays in the graph."""
    with fake_group(2):
        made = HandGraph()
        x, w = operand(made, 48, 16, "x"), operand(made, 16, 40)
        sent = make is graphs.sent_rows
        y = graphs.exchange(made, made.mm(x, w)) if sent else made.mm(graphs.exchange(made, x), w)
        report = made.output(made.call(aten.relu.default, y)).run(schedule="fused")
    assert "relu" in report.after and "epilogue" not in report.after, report.after


REFUSED = {
    "fp8": (graphs.scaled, "no fused kernel multiplies fp8 with scales"),
    "one bias for all columns": (graphs.one_bias_for_all_columns, "or an unsupported matmul or bias"),
    "uneven parts, sent": (graphs.uneven, "each rank's part has its own number of rows; a fused kernel sends equal"),
    "uneven parts, received": (graphs.uneven_received, "each rank's part has its own number of rows"),
    "a sum": (graphs.summed, "2 matmuls are added before the all-to-all; a fused kernel computes only one"),
    "a contraction of narrow slices": (
        graphs.contracted,
        "each rank's slice of the contracted dim has 16 elements; a fused kernel expects a multiple of 64",
    ),
    "a contraction on the right": (
        graphs.contracted_on_the_right,
        "a fused kernel expects the ranks' slices side by side",
    ),
    "contracted heads of a dynamic sequence": (graphs.contracted_dynamic, "a size or stride is only known at run time"),
    "an activation": (graphs.activated, "an unsupported op between matmul and collective"),
    "fp32": (lambda: graphs.sent_rows(dtype=torch.float32), "the matrices are torch.float32; expected fp16 or bf16"),
    "narrow slices": (lambda: graphs.sent_heads(width=2), "rows of 16 and of 4 elements cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    make, text = REFUSED[name]
    with fake_group(2):
        (site,) = make().run(schedule="fused").sites
    assert site.decision.status == "refused" and text in site.decision.reasons[0].text, site.decision.reasons


def test_a_transport_that_the_kernel_cannot_use() -> None:
    """In ``matmul_all_to_all``, the kernel stores its tiles in the peers' memory, so it cannot use copy engines. In
    ``all_to_all_matmul``, copy engines may bring the rows."""
    with fake_group(2):
        (sent,) = graphs.sent_rows().run(schedule="fused", transport="copy_engine").sites
        (received,) = graphs.received_rows().run(schedule="fused", transport="copy_engine").sites
    assert "schedule fused can only use sm_push for matmul_all_to_all" in sent.decision.reasons[0].text
    assert json.loads(received.decision.plan[0].parameters["settings"])["copies_from"] == 0


@pytest.mark.parametrize("pattern", ["matmul_all_to_all", "all_to_all_matmul"])
def test_a_token_count_that_changes(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """The op is planned for up to ``max_tokens``. For larger counts, it runs the plain collective."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        made = HandGraph()
        x, w = made.input(4096, 2048, name="x", dtype=BF16, dynamic=[0]), operand(made, 2048, 2048)
        both = made.call(aten.cat.default, [x, x])
        sent = pattern == "matmul_all_to_all"
        y = graphs.exchange(made, made.mm(both, w)) if sent else made.mm(graphs.exchange(made, both), w)
        (site,) = made.output(y).run(schedule="fused", max_tokens=16384).sites
    fused, above = site.decision.plan
    assert (fused.schedule, above.schedule) == ("fused", "keep") and fused.tokens == (0, 16384)


def test_an_empty_slice_is_planned_and_written() -> None:
    """The slice has no rows, so the op runs the plain collective."""
    with fake_group(2):
        report = graphs.sent_rows(rows=0).run(schedule="fused")
    assert "fused_matmul_all_to_all" in report.after, report.notices


@pytest.mark.parametrize("make", [graphs.sent_rows, graphs.received_rows])
def test_estimate(monkeypatch: pytest.MonkeyPatch, make: Callable[..., HandGraph]) -> None:
    """The estimate counts the copy out of the workspace. By estimate, the kernel must be more than 25 % faster than the
    plain graph, because all-to-alls were not measured on 8 ranks."""
    machine = machine_for("cuda")
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine)
    plain, plans = FusedSchedule.where_it_pays, []
    monkeypatch.setattr(FusedSchedule, "where_it_pays", lambda *a: plans.append(plain(*a)) or plans[-1])
    with fake_group(8):
        for rows in (1, 256, 1024, 2048):
            for inner in (512, 4096, 16384):
                (site,) = make(rows, inner, 8192).run(schedule="auto").sites
                estimate = site.decision.plan[0].estimate_us
                assert plans[-1] is None or estimate["fused"] * MARGIN_UNMEASURED < estimate["keep"], (rows, inner)
                wire, matmul = estimate["collective"] - machine.collective_seconds * 1e6, estimate["matmul"]
                # In ``sent_rows``, what arrives from 7 ranks is copied. In ``received_rows``, other nodes also read the
                # rows of all ranks, so these are copied.
                copied = 7 * rows * 8192 if make is graphs.sent_rows else 8 * rows * inner
                copy = 2 * copied * 2 / machine.memory_bytes * 1e6
                fixed = (cost.COST.leg_seconds + 7 * cost.COST.leg_peer_seconds) * 1e6
                expected = max(wire, matmul) + cost.COST.exposed[1] * min(wire, matmul) + copy + fixed
                assert estimate["fused"] == pytest.approx(expected, abs=0.3)
    # In the graph of ``received_rows``, this copy costs more than the kernel hides.
    assert {plan is None for plan in plans} == ({True, False} if make is graphs.sent_rows else {True})

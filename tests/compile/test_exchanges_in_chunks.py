# SPDX-License-Identifier: Apache-2.0
"""All-to-alls beside matmuls, as one op of schedule ``chunked``: the graphs, what is refused, and when ``auto`` chooses
the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from overlap_inductor.facts.cost_model import MARGIN_UNMEASURED
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked.cost import COST
from overlap_inductor.sites import sizes as site_sizes
from tests.compile import scaled_graphs
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.compile.scaled_graphs import weight
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.hand_graph import c10d

pytestmark = pytest.mark.usefixtures("reachable")


def _exchange(made: HandGraph, x: fx.Node, extra: int = 0) -> fx.Node:
    """An all-to-all of equal parts of dim 0. ``extra``: rows that the first part has more than the last one."""
    part = x.meta["val"].shape[0] // made.world_size
    parts = [part] * made.world_size
    parts[0], parts[-1] = part + extra, part - extra
    return made.wait(made.call(c10d.all_to_all_single.default, x, parts, parts, made.group))


def _sent_rows(rows: int = 24, inner: int = 16, columns: int = 40, dtype: torch.dtype = BF16) -> HandGraph:
    made = HandGraph()
    x = operand(made, rows * made.world_size, inner, "x", dtype)
    return made.output(_exchange(made, made.mm(x, operand(made, inner, columns, dtype=dtype))))


def _sent_heads(width: int = 8) -> HandGraph:
    """The heads of a batch of two sequences are exchanged, with a bias."""
    made = HandGraph()
    columns, ranks = 2 * width * made.world_size, made.world_size
    pair = operand(made, 48, 16, "x"), operand(made, 16, columns)
    heads = made.call(aten.addmm.default, made.input(columns, name="bias", dtype=BF16), *pair)
    heads = made.call(aten.permute.default, made.view(heads, 2, 24, ranks, 2, width), [2, 1, 0, 3, 4])
    sent = made.call(aten.clone.default, heads, memory_format=torch.contiguous_format)
    return made.output(_exchange(made, made.view(sent, 48 * ranks, 2 * width)))


def _received_rows(rows: int = 24, inner: int = 16, columns: int = 40) -> HandGraph:
    """A matmul of what arrives, a second one whose rows are transposed, and another reader."""
    made = HandGraph()
    x = _exchange(made, operand(made, rows * made.world_size, inner, "x"))
    plain = made.mm(x, operand(made, inner, columns))
    turned = made.mm(operand(made, 8, inner, "v"), made.call(aten.permute.default, x, [1, 0]))
    return made.output(plain, turned, made.call(aten.add.Tensor, x, 1))


SITES = {
    "fused_graph/sent_rows_in_chunks.txt": _sent_rows,
    "fused_graph/sent_heads_in_chunks.txt": _sent_heads,
    "fused_graph/received_rows_in_chunks.txt": _received_rows,
    "fused_graph/joined_heads_in_chunks.txt": lambda: _contracted(),
    "fused_graph/joined_rows_in_chunks.txt": lambda: _contracted_rows(),
    "fused_graph/joined_heads_and_gradient_in_chunks.txt": lambda: _contracted_twice(),
}


@pytest.mark.parametrize("file", SITES)
def test_golden(file: str) -> None:
    """Catches a copy before the exchange, a bias or weight in another order than the slices, and a wrong layout of what
    arrives."""
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


def _uneven() -> HandGraph:
    made = HandGraph()
    product = made.mm(operand(made, 48, 16, "x"), operand(made, 16, 40))
    return made.output(_exchange(made, product, extra=8))


def _uneven_received() -> HandGraph:
    made = HandGraph()
    return made.output(made.mm(_exchange(made, operand(made, 48, 16, "x"), extra=8), operand(made, 16, 40)))


def _summed() -> HandGraph:
    made = HandGraph()
    pairs = [(operand(made, 48, 16, f"x{i}"), operand(made, 16, 40, f"w{i}")) for i in range(2)]
    return made.output(_exchange(made, made.call(aten.add.Tensor, *(made.mm(*pair) for pair in pairs))))


def _joined_heads(made: HandGraph) -> fx.Node:
    """The heads that arrive, side by side."""
    ranks = made.world_size
    x = made.view(_exchange(made, operand(made, 24 * ranks, 16, "x")), ranks, 24, 16)
    return made.view(made.call(aten.permute.default, x, [1, 0, 2]), 24, 16 * ranks)


def _contracted() -> HandGraph:
    """The exchanged heads are contracted, as in the output projection of Ulysses attention."""
    made = HandGraph()
    pair = _joined_heads(made), operand(made, 16 * made.world_size, 40)
    return made.output(made.call(aten.addmm.default, made.input(40, name="bias", dtype=BF16), *pair))


def _contracted_twice() -> HandGraph:
    """A gradient of the heads arrives. A projection's input's gradient contracts the heads, its weight's gradient does
    not."""
    made = HandGraph()
    x = _joined_heads(made)
    turned = made.call(aten.permute.default, x, [1, 0])
    return made.output(made.mm(x, operand(made, 16 * made.world_size, 40)), made.mm(turned, operand(made, 24, 8, "v")))


def _contracted_rows() -> HandGraph:
    """The rows that arrive are contracted, as in a weight's gradient."""
    made = HandGraph()
    x = _exchange(made, operand(made, 24 * made.world_size, 16, "x"))
    return made.output(made.mm(made.call(aten.permute.default, x, [1, 0]), operand(made, 24 * made.world_size, 40)))


def _contracted_dynamic() -> HandGraph:
    made = HandGraph()
    x = made.input(48, 16, name="x", dtype=BF16, dynamic=[0])
    rows = x.meta["val"].shape[0]
    both = made.call(aten.cat.default, [x, x])
    arrived = made.wait(made.call(c10d.all_to_all_single.default, both, [rows, rows], [rows, rows], made.group))
    heads = made.call(aten.permute.default, made.view(arrived, 2, rows, 16), [1, 0, 2])
    return made.output(made.mm(made.view(heads, rows, 32), operand(made, 32, 40)))


def _activated() -> HandGraph:
    made = HandGraph()
    product = made.mm(operand(made, 48, 16, "x"), operand(made, 16, 40))
    return made.output(_exchange(made, made.call(aten.relu.default, product)))


def _one_bias_for_all_columns() -> HandGraph:
    made = HandGraph()
    pair = operand(made, 48, 16, "x"), operand(made, 16, 32)
    product = made.call(aten.addmm.default, made.input(1, name="bias", dtype=BF16), *pair)
    product = made.call(aten.permute.default, made.view(product, 48, 2, 16), [1, 0, 2])
    return made.output(_exchange(made, made.view(product, 96, 16)))


def _sent_as_other_floats() -> HandGraph:
    made = HandGraph()
    arrived = _exchange(made, made.call(aten.view.dtype, operand(made, 48, 16, "x"), torch.float16))
    return made.output(made.mm(made.call(aten.view.dtype, arrived, BF16), operand(made, 16, 40)))


def _scaled() -> HandGraph:
    made = HandGraph()
    return made.output(_exchange(made, scaled_graphs.multiply(made, scaled_graphs.fp8(made, 64, 32), weight(made))))


REFUSED = {
    "fp8": (_scaled, "no schedule in chunks multiplies fp8 with scales in matmul_all_to_all"),
    "one bias for all columns": (_one_bias_for_all_columns, "a bias of more than one row"),
    "bf16 sent as fp16": (_sent_as_other_floats, "the rows cannot be put in the ranks' order"),
    "uneven parts, sent": (_uneven, "each rank's part has its own number of rows; a schedule in chunks sends equal"),
    "uneven parts, received": (_uneven_received, "each rank's part has its own number of rows"),
    "a sum": (_summed, "2 matmuls are added before the all-to-all; a schedule in chunks computes only one"),
    "contracted heads of a dynamic sequence": (_contracted_dynamic, "a size or stride is only known at run time"),
    "an activation": (_activated, "the rows cannot be put in the ranks' order"),
    "fp32": (lambda: _sent_rows(dtype=torch.float32), "multiplies fp16 or bf16 here, not torch.float32"),
    "narrow slices": (lambda: _sent_heads(width=2), "rows of 16 and of 4 elements cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    make, text = REFUSED[name]
    with fake_group(2):
        (site,) = make().run(schedule="chunked").sites
    assert site.decision.status == "refused" and text in site.decision.reasons[0].text, site.decision.reasons


@pytest.mark.parametrize("pattern", ["matmul_all_to_all", "all_to_all_matmul"])
def test_a_token_count_that_changes(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """The op runs the plain collective below the count from which it pays, and above ``max_tokens``."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        made = HandGraph()
        inner, columns = (2048, 8192) if pattern == "matmul_all_to_all" else (8192, 2048)
        x, w = made.input(4096, inner, name="x", dtype=BF16, dynamic=[0]), operand(made, inner, columns)
        both = made.call(aten.cat.default, [x, x])
        y = _exchange(made, made.mm(both, w)) if pattern == "matmul_all_to_all" else made.mm(_exchange(made, both), w)
        (site,) = made.output(y).run(schedule="auto", transport="copy_engine", max_tokens=16384).sites
    below, chunked, above = site.decision.plan
    assert (below.schedule, chunked.schedule, above.schedule) == ("keep", "chunked", "keep")
    assert 1024 <= chunked.tokens[0] <= 8192 and chunked.tokens[1] == 16384 == chunked.parameters["max_tokens"]


def test_an_empty_slice_is_planned_and_written() -> None:
    """No rows: the op runs the plain collective, which moves nothing."""
    with fake_group(2):
        report = _sent_rows(rows=0).run(schedule="chunked")
    assert "chunked_matmul_all_to_all" in report.after, report.notices


def test_auto_chooses_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are chosen only if they are estimated to be 25 % faster than the plain graph, because they were not
    measured on all-to-alls. The estimate counts the copy out of the workspace."""
    machine = machine_for("cuda")
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine)
    found = {}
    with fake_group(8):
        for rows in (1, 256, 1024, 2048):
            for make in (_sent_rows, _received_rows):
                for inner in (512, 4096, 16384):
                    (site,) = make(rows, inner, 8192).run(schedule="auto", transport="copy_engine").sites
                    piece = site.decision.plan[0]
                    found[make, rows, inner] = piece.schedule, piece.estimate_us
    assert {schedule for schedule, _ in found.values()} == {"keep", "chunked"}
    for (make, rows, inner), (schedule, estimate) in found.items():
        if schedule == "chunked":
            assert estimate["chunked"] * MARGIN_UNMEASURED < estimate["keep"], (make, rows, inner)
        if make is _sent_rows:
            wire, matmul = estimate["collective"] - machine.collective_seconds * 1e6, estimate["matmul"]
            copy = 2 * 7 * rows * 8192 * 2 / machine.memory_bytes * 1e6
            fixed = (COST.leg_seconds + 7 * COST.leg_peer_seconds) * 1e6
            expected = max(wire, matmul) + COST.exposed[1] * min(wire, matmul) + copy + fixed
            assert estimate["chunked"] == pytest.approx(expected, abs=0.3)
    assert found[_sent_rows, 2048, 4096][0] == "chunked" and found[_sent_rows, 1, 4096][0] == "keep"

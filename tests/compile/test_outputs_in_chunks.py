# SPDX-License-Identifier: Apache-2.0
"""Gathers of a matmul's result, as one op of schedule ``chunked``: graphs, refusals and the choice of ``auto``."""

from __future__ import annotations

import json

import pytest
import torch
from torch import fx

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked.output_sizes import MOST_BANDS
from overlap_inductor.passes import plan as planner
from overlap_inductor.runtime.arena import READS
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")
OP = "chunked_matmul_all_gather.default"


def product(made: HandGraph, rows: int = 24, dtype: torch.dtype = BF16, bias: bool = False) -> fx.Node:
    x, w = operand(made, rows, 16, "x", dtype), operand(made, 16, 40, dtype=dtype)
    if not bias:
        return made.mm(x, w)
    return made.call(aten.addmm.default, made.input(40, name="bias", dtype=dtype), x, w)


def rows(**given: bool) -> HandGraph:
    """The ranks' slices stay one below the other."""
    made = HandGraph()
    return made.output(made.gather(product(made, **given)))


def head() -> HandGraph:
    """A language model's head: the slices are put side by side, and the logits have a batch dim."""
    made = HandGraph()
    logits = made.view(product(made, bias=True), 1, 24, 40)
    return made.output(made.gather_on(logits, 2))


def joined_in_another_way(case: str) -> HandGraph:
    made = HandGraph()
    y = made.view(product(made), 2, 12, 40)
    if case == "another dim":
        return made.output(made.gather_on(y, 1))
    gathered = made.gather(y)
    order = [1, 0] if case == "another order" else [0, 1]
    join = made.join(gathered, 2, 2, order)
    other = made.call(aten.relu.default, gathered) if case == "another reader" else join
    return made.output(join, other)


SITES = {"fused_graph/gathered_rows_in_chunks.txt": rows, "fused_graph/gathered_head_in_chunks.txt": head}


@pytest.mark.parametrize("file", SITES)
def test_golden(file: str) -> None:
    """A ``cat`` that puts the slices side by side is a part of the op."""
    with fake_group(2):
        check_golden(SITES[file]().run(schedule="chunked").after, file)


@pytest.mark.parametrize("name", SITES)
def test_one_text_on_all_ranks(name: str) -> None:
    texts = set()
    for rank in (0, 7):
        with fake_group(8, rank):
            report = SITES[name]().run(schedule="chunked")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["chunked"], report.notices
            texts.add((report.before, report.after, report.plan_hash))
    assert len(texts) == 1


@pytest.mark.parametrize("case", ["another dim", "another order", "another reader"])
def test_another_reader_of_the_slices_stays(case: str) -> None:
    """The op returns the slices one below the other, as the collective does."""
    with fake_group(2):
        report = joined_in_another_way(case).run(schedule="chunked")
    assert report.notices == [] and "aten.cat.default" in report.after
    assert OP in report.after and "_c10d_functional" not in report.after
    assert "None, False, " in report.after


def cast() -> HandGraph:
    made = HandGraph()
    return made.output(made.gather(made.call(aten._to_copy.default, product(made), dtype=torch.float32)))


def padded() -> HandGraph:
    made = HandGraph()
    return made.output(made.gather(made.call(aten.constant_pad_nd.default, product(made), [0, 8])))


def summed() -> HandGraph:
    made = HandGraph()
    other = made.mm(operand(made, 24, 16, "y"), operand(made, 16, 40, "v"))
    return made.output(made.gather(made.call(aten.add.Tensor, product(made), other)))


REFUSED = {
    "sent as fp32": (cast, "values sent as another dtype"),
    "padded": (padded, "a schedule in chunks cannot compute this site"),
    "a sum": (summed, "a schedule in chunks cannot compute this site"),
    "fp32": (lambda: rows(dtype=torch.float32), "multiplies fp16 or bf16 here, not torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    make, text = REFUSED[name]
    with fake_group(2):
        (site,) = make().run(schedule="chunked").sites
    assert site.decision.status == "refused" and text in site.decision.reasons[0].text, site.decision.reasons


def large_head(tokens: int, columns: int, dynamic: bool = False, joined: bool = True) -> HandGraph:
    made = HandGraph()
    x = made.input(tokens, 8192, name="x", dtype=BF16, dynamic=[0] if dynamic else [])
    y = made.mm(x, operand(made, 8192, columns // made.world_size))
    return made.output(made.gather_on(y, 1) if joined else made.gather(y))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("joined", [False, True])
def test_auto_chooses_chunks_for_a_large_head(monkeypatch: pytest.MonkeyPatch, world_size: int, joined: bool) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(world_size):
        (small,), (large,) = (large_head(n, 32000, joined=joined).run(schedule="auto").sites for n in (16, 8192))
    assert small.decision.moving.schedule == "keep"
    moving = large.decision.moving
    assert (moving.schedule, moving.transport) == ("chunked", "copy_engine")
    estimate = moving.estimate_us
    longer, shorter = sorted((estimate["matmul"], estimate["collective"] - 30), reverse=True)
    fixed = 8 + 7 * (world_size - 1) + 8 * MOST_BANDS
    assert estimate["chunked"] == pytest.approx(longer + shorter / MOST_BANDS + fixed, abs=0.5)


@pytest.mark.parametrize(("transport", "reads"), [("auto", True), ("copy_engine", True), ("sm_push", False)])
def test_a_rank_reads_its_peers_rows_if_the_transport_can(transport: str, reads: bool) -> None:
    """The workspace then holds this rank's slice only, in a slot of its own kind."""
    with fake_group(2):
        (site,) = head().run(schedule="chunked", transport=transport).sites
        piece = site.decision.moving
        needs = planner.workspace([head().found().sites[0].decided(site.decision)])["0"]
    assert json.loads(piece.parameters["settings"])["reads"] is reads
    own = 24 * 40 * 2
    assert needs == [[site.facts.id, own, MOST_BANDS, READS] if reads else [site.facts.id, 2 * own, MOST_BANDS]]


def test_a_token_count_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op runs the plain collective below the count from which overlap pays, and above ``max_tokens``."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(4):
        report = large_head(4096, 32000, dynamic=True).run(schedule="auto", transport="copy_engine")
        (site,) = report.sites
    below, chunked, above = site.decision.plan
    assert (below.schedule, chunked.schedule, above.schedule) == ("keep", "chunked", "keep")
    assert 128 <= chunked.tokens[0] <= 4096 and chunked.tokens[1] == 16384 == chunked.parameters["max_tokens"]
    assert "None, True, " in report.after and "aten.cat" not in report.after, report.notices

# SPDX-License-Identifier: Apache-2.0
"""Lookups and their all-to-all as one op of schedule ``fused``: graphs, refusals and the planner's choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.fused import table_cost
from overlap_inductor.lowerings.ring import schedule as ring
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.readings import summary
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.exchange_spellings import exchange
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.golden import check_golden
from tests.support.golden import report_text

pytestmark = pytest.mark.usefixtures("reachable")

PATTERN = "embedding_all_to_all"


def _trained(kind: str, joined: str, tables: int = 3, schedule: str = "fused") -> list[OverlapReport]:
    """The reports of the forward and the backward graph."""
    torch.manual_seed(0)
    model = DLRM(tables, 50, 4, 5, kind, joined)
    batch = batch_of(model, 4, 3, torch.Generator().manual_seed(1))
    return reports_of(model, *batch.arguments(), schedule=schedule)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_golden_graphs_and_what_ranks_compare(rank: int) -> None:
    """Site, decision and graphs are those of the golden file. Ranks compare how they send."""
    with fake_group(2, rank):
        forward, _ = _trained("sum", "cat")
    (step,) = json.loads(forward.exchange)["steps"]
    order = "in order [0, 2, 1, 3] of [2, 3, 4, 4] in embedding_all_to_all"
    assert step.startswith(f"g0: all_to_all float32 [8, 12] cut [3] by table {order} by fused/sm_push")
    if torch.__version__.startswith("2.13"):
        text = f"{report_text(forward)}\nbefore\n{forward.before}\nafter\n{forward.after}"
        check_golden(text.rstrip() + "\n", "embedding/fused.txt")


@pytest.mark.parametrize(
    ("kind", "joined", "written"),
    [
        ("mean", "tables first", "'mean', False, False, True"),
        ("embedding", "stack", "[], [], [-1, -1, -1], 'sum', False, True, False"),
    ],
)
def test_what_the_op_is_told(kind: str, joined: str, written: str) -> None:
    """The op gets:

    - how a bag is pooled: ``sum`` or ``mean``,
    - the order of the rows that go to one rank: by bag or by table,
    - whether the backward reads results of the lookups besides the pooled rows.

    The forward graph no longer holds the lookups. The backward's exchange stays as written.
    """
    with fake_group(2):
        forward, backward = _trained(kind, joined)
    assert [s.decision.status for s in forward.sites] == ["overlapped"]
    assert written in forward.after and "aten.embedding" not in forward.after
    assert "aten._embedding_bag.default" not in forward.after and "all_to_all_single" not in forward.after
    (site,) = backward.sites
    assert site.decision.status == "refused" and "gradients of tables" in site.decision.reasons[0].text


def _bags(*tables: torch.Tensor, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def layer(indices: torch.Tensor) -> torch.Tensor:
        pooled = [F.embedding_bag(indices, t, **{"mode": "sum", **options}) for t in tables]
        return exchange(torch.cat(pooled, 1))

    return layer


def _indices(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return (torch.arange(24).view(8, 3) % 7).to(dtype)


def _refusal(fn: Callable[..., Any], *args: torch.Tensor, **fields: Any) -> str:
    (site,) = report_of(fn, *args, schedule="fused", **fields).sites
    assert site.decision.status == "refused"
    return site.decision.reasons[0].text


@pytest.mark.usefixtures("two")
def test_what_the_kernel_cannot_compute_has_a_reason() -> None:
    w, v, i = torch.randn(7, 4), torch.randn(9, 4), _indices()
    wide, narrow = torch.randn(7, 2048), torch.randn(7, 6)
    assert "float64" in _refusal(_bags(w.double(), v.double()), i)
    assert "multiple of 4, at most 1024" in _refusal(_bags(wide, wide + 1), i)
    assert "vectors of 16 bytes" in _refusal(_bags(narrow, narrow + 1), i)
    assert "maximum of a bag" in _refusal(_bags(w, v, mode="max"), i)
    assert "scaled by frequency" in _refusal(_bags(w, v, scale_grad_by_freq=True), i)
    assert "can only use sm_push" in _refusal(_bags(w, v), i, transport="copy_engine")

    def two_modes(i: torch.Tensor) -> torch.Tensor:
        return exchange(torch.cat([F.embedding_bag(i, w, mode="sum"), F.embedding_bag(i, v, mode="mean")], 1))

    def computed(i: torch.Tensor) -> torch.Tensor:
        return exchange(torch.cat([F.embedding(i, t).sum(1) for t in (w, v)], 1))

    def read_elsewhere(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = (F.embedding_bag(i, t, mode="sum") for t in (w, v))
        return exchange(torch.cat([one, other], 1)), one.sin()

    def two_widths(i: torch.Tensor) -> torch.Tensor:
        """Each sample reads one row of 8 numbers from one table, and two rows of 4 from another. So both results have
        the same shape."""
        whole = F.embedding(i[:, 0], torch.ones(7, 8))
        return exchange(torch.cat([whole, F.embedding(i[:, :2], w).flatten(1)], 1))

    assert "rows of 4 and embedding has" in _refusal(two_widths, i)
    assert "expected all tables to be looked up in one way" in _refusal(two_modes, i)
    assert "computed between a lookup and the exchange" in _refusal(computed, i)
    assert "also reads the results" in _refusal(read_elsewhere, i)


@pytest.mark.usefixtures("two")
def test_padding_samples_and_short_indices_are_computed() -> None:
    """The kernel supports a padding index, weights of samples and int32 indices."""
    w, v, i = torch.randn(7, 4), torch.randn(9, 4), _indices(torch.int32)

    def weighted(indices: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        pooled = [F.embedding_bag(indices, t, mode="sum", per_sample_weights=samples, padding_idx=2) for t in (w, v)]
        return exchange(torch.cat(pooled, 1))

    report = report_of(weighted, i, torch.rand(8, 3), schedule="fused")
    assert summary(report) == [(PATTERN, 0, ["embedding_bag M"] * 2, "overlapped")]
    assert "[2, 2], 'sum', False, True, False" in report.after


def test_bags_of_dynamic_lengths() -> None:
    """The number of indices may be known only at run time. If the batch size is known only at run time, the site is
    refused."""
    with fake_group(2), torch.no_grad():
        model = DLRM(2, 50, 4, 5)
        batch = batch_of(model, 4, 3, torch.Generator().manual_seed(1))
        for indices in batch.indices:
            torch._dynamo.mark_dynamic(indices, 0)
        report = report_of(model, *batch.arguments(), schedule="fused")
        assert summary(report) == [(PATTERN, 0, ["embedding_bag M"] * 2, "overlapped")]
        w, indices = torch.randn(7, 4), torch.arange(32).view(16, 2) % 7
        torch._dynamo.mark_dynamic(indices, 0)

        def layer(i: torch.Tensor) -> torch.Tensor:
            whole = torch.cat([i, i])
            return exchange(torch.cat([F.embedding_bag(whole, t, mode="sum") for t in (w, w + 1)], 1))

        assert "only known at run time" in _refusal(layer, indices)


def _chosen(longest: int, mine: int, ranks: int = 8) -> tuple[str, dict[str, float]]:
    """The chosen schedule, and the estimates of all compared schedules. Each rank has ``mine`` samples, and each bag
    has ``longest`` rows."""
    torch._dynamo.reset()
    with fake_group(ranks), torch.no_grad():
        model = DLRM(8, 64, 64, 5)
        batch = batch_of(model, mine, longest, torch.Generator().manual_seed(1), square=True)
        (site,) = reports_of(model, *batch.arguments(), schedule="auto", patterns=(PATTERN,))[0].sites
    return site.decision.plan[0].schedule, site.decision.plan[0].estimate_us


@pytest.mark.thorough
def test_the_planner_keeps_large_bags_of_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    assert _chosen(64, 16384)[0] == "keep"


def test_the_planner_chooses_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs the lookups beside the exchange, and saves launches. It does not pay if the lookups take much
    longer than the exchange."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))

    schedule, estimate = _chosen(8, 16384)
    bags, itemsize, machine = 8 * 16384 * 8, 4 * 64, machine_for("cuda")
    lookups, wire = 9 * bags * itemsize / machine.memory_bytes, bags * itemsize * 7 / 8 / machine.link_bytes
    copy = 2 * bags * itemsize * 7 / 8 / machine.memory_bytes
    expected = max(lookups, wire) + table_cost.EXPOSED * min(lookups, wire) + copy + 15e-6 + 7 * 8e-6
    assert schedule == "fused" and estimate["fused"] == pytest.approx(expected * 1e6, rel=1e-3)
    assert estimate["fused"] * 1.25 < estimate["keep"] == pytest.approx((lookups + wire) * 1e6 + 30 + 80, rel=1e-3)
    # Few bags: one kernel takes the place of eight. Large bags: the lookups take long, and there is little to hide.
    assert _chosen(8, 8)[0] == "fused" and _chosen(64, 1024)[0] == "keep"


def test_auto_takes_no_ring_of_lookups_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, rings of lookups took more than twice as long as estimated. So ``auto`` takes schedule ``fused``, even
    if the ring has the shortest estimate."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    monkeypatch.setattr(ring, "on_gpu", lambda device: True)
    schedule, estimate = _chosen(1, 262144, ranks=2)
    assert estimate["ring"] < estimate["fused"] and schedule == "fused"

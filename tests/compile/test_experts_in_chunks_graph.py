# SPDX-License-Identifier: Apache-2.0
"""Experts between two exchanges, planned for H200s: what schedule ``chunked`` writes, when ``auto`` takes it, and when
rows are known to arrive in the order of the experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from bench.support.experts import ExpertSizes
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.lowerings.chunked import experts
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.target import planning_for
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_by_fields
from tests.support.fake_group import reports_of
from tests.support.golden import check_golden

OP = "chunked_all_to_all_experts.default("


@pytest.fixture(autouse=True)
def _scalars() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def _given(tokens: int, sizes: ExpertSizes, trained: bool = False) -> tuple[torch.Tensor, ...]:
    x = torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16).requires_grad_(trained)
    ids = torch.randint(0, sizes.experts, (tokens, sizes.chosen))
    return x, ids, torch.rand(tokens, sizes.chosen).requires_grad_(trained)


def _calls(report: OverlapReport) -> list[str]:
    return [line for line in report.after.splitlines() if OP in line]


def test_both_graphs_of_training_read_rows_where_they_arrived() -> None:
    """The proof needs nodes that only the joint graph has, so it must reach the backward graph. Ranks whose token
    counts round to one number hold equal workspaces."""
    plans = []
    for rank in (0, 1):
        with fake_group(2, rank), planning_for(BOXES["h200"]):
            layer = DispatchedExperts(rank, 2)
            (reports,) = reports_by_fields(
                layer, *_given(1000 + rank, SMALL, trained=True), several=[{"schedule": "chunked"}]
            )
        assert [r.phase for r in reports] == ["forward", "backward"]
        for report in reports:
            (call,) = _calls(report)
            assert "], True, '" in call
            assert "aten._grouped_mm" in call and "chunked_grouped_mm" not in call
            assert [s.decision.moving.transport for s in report.sites] == ["copy_engine"]
        plans.append([r.exchange for r in reports])
    assert plans[0] == plans[1]
    if torch.__version__.startswith("2.13"):
        check_golden("\n".join(f"{r.phase}\n{r.after}" for r in reports), "experts/in_chunks.txt")
    assert all("messages" in plan for plan in plans[0])


class _Moved(DispatchedExperts):
    """Sends rows whose numbers are not the sums of the runs that the index moves: each rank's first run is left out of
    its count. The rows still arrive in some order, but the ranks' parts are not the index's."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(ids.reshape(-1).float(), bins=8, min=0, max=8).long()
        by_rank = counts.view(self.world_size, -1)
        arriving = funcol.wait_tensor(funcol.all_to_all_single(by_rank, None, None, dist.group.WORLD)).reshape(-1)
        sent = by_rank[:, 1:].sum(dim=1).tolist()
        received = arriving.view(self.world_size, -1)[:, 1:].sum(dim=1).tolist()
        arrived = self.exchange(x, received, sent)
        shape, arrived, places, each = self._permute(arrived, arriving)
        back = arrived.new_empty(shape)
        back[places, :] = self._experts(arrived, each)
        return self.exchange(back, sent, received)


def test_rows_that_are_not_known_to_be_sorted_are_gathered() -> None:
    with fake_group(2), planning_for(BOXES["h200"]), torch.no_grad():
        (report,) = reports_of(_Moved(0, 2), *_given(64, SMALL), schedule="chunked")
    (call,) = _calls(report)
    assert "], False, '" in call


class _Runs(DispatchedExperts):
    """The number of runs is known only when the graph runs."""

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        runs = count.item()
        torch._check(runs >= 1)
        lengths = torch.arange(2 * runs) // 2
        by_rank = lengths.view(runs, 2)
        total = by_rank.sum(dim=1)
        arrived = self.exchange(x, [total[0].item(), total[1].item()], [x.shape[0] - 3, 3])
        starts = (lengths.cumsum(0) - lengths).view(runs, 2).t().reshape(-1)
        moved = by_rank.t().reshape(-1)
        segments = torch.arange(moved.shape[0]).repeat_interleave(moved, output_size=arrived.shape[0])
        ends = moved.cumsum(0) - moved
        places = starts[segments] + torch.arange(segments.shape[0]) - ends[segments]
        each = torch.arange(1, 5, dtype=torch.int32)
        return torch._grouped_mm(arrived[places, :], self.w1.bfloat16().transpose(-2, -1), offs=each)


def test_runs_of_unknown_number_are_compiled() -> None:
    """To compare their number with the number of ranks would fail the compile."""
    with fake_group(2), planning_for(BOXES["h200"]), torch.no_grad():
        x = torch.randn(16, SMALL.hidden, dtype=torch.bfloat16)
        (report,) = reports_of(_Runs(0, 2), x, torch.tensor(2), schedule="chunked")
    assert not report.sites and not report.notices


def test_a_group_of_too_many_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of ``kernels.messages`` have a bit for each rank."""
    monkeypatch.setattr(experts, "MOST_RANKS", 3)
    with fake_group(4), planning_for(BOXES["h200"]), torch.no_grad():
        (report,) = reports_of(DispatchedExperts(0, 4), *_given(64, SMALL), schedule="chunked")
    (site,) = report.sites
    assert "the group has 4 ranks; messages can be sent among 3" in site.decision.reasons[0].text


class _Dropped(DispatchedExperts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = (scores[:, 0] > 0.1).nonzero().view(-1)
        return super().forward(x[kept], ids[kept], scores[kept])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_an_unknown_number_of_sent_rows_is_refused() -> None:
    for schedule, code in (("chunked", "schedule_not_available"), ("auto", "dynamic_shape")):
        with fake_group(2), planning_for(BOXES["h200"]), torch.no_grad():
            (report,) = reports_of(_Dropped(0, 2), *_given(64, SMALL), schedule=schedule)
        (site,) = report.sites
        assert site.decision.reasons[0].code == code and not report.notices
        if schedule == "chunked":
            assert "messages need a size" in site.decision.reasons[0].text


def test_a_dynamic_number_of_tokens_is_overlapped_only_if_the_user_says_so() -> None:
    """Ranks have different numbers of tokens, so the op cannot choose to run few tokens as written."""
    found = {}
    for schedule in ("chunked", "auto"):
        with fake_group(2), planning_for(BOXES["h200"]), torch.no_grad():
            given = _given(64, SMALL)
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 0)
            (report,) = reports_of(DispatchedExperts(0, 2), *given, schedule=schedule)
        (site,) = report.sites
        found[schedule] = site.decision.status, sorted(r.code for r in site.decision.reasons)
    assert found == {"chunked": ("overlapped", []), "auto": ("kept", ["dynamic_shape", "host_bound"])}


def test_a_graph_that_inductor_captures_is_left_as_written() -> None:
    with fake_group(2), planning_for(BOXES["h200"]), torch.no_grad():
        with torch._inductor.config.patch({"triton.cudagraphs": True}):
            (report,) = reports_of(DispatchedExperts(0, 2), *_given(64, SMALL), schedule="chunked")
    (site,) = report.sites
    assert "run the graph as a CUDA graph" in site.decision.reasons[0].text


@pytest.mark.parametrize(
    ("tokens", "world_size", "trained", "schedule"),
    [
        (16384, 2, False, "chunked"),
        (8192, 2, False, "keep"),
        (32768, 4, False, "chunked"),
        (16384, 4, False, "keep"),
        (32768, 2, True, "keep"),
    ],
)
def test_auto_counts_launches_and_copies(tokens: int, world_size: int, trained: bool, schedule: str) -> None:
    """Chunks of a layer of 64 experts gain with 16384 tokens on 2 H200s, and with 32768 on 4. With half as many, the
    host may be the limit.
    In training, the values that are saved for the backward graph are copied into the order of the experts."""
    with fake_group(world_size), planning_for(BOXES["h200"]), torch.set_grad_enabled(trained):
        layer = DispatchedExperts(0, world_size, sizes=ExpertSizes(experts=64, chosen=8)).bfloat16()
        for name, shape in (("w1", (1024, 2048)), ("w2", (2048, 1024)), ("w3", (1024, 2048))):
            weight = torch.empty(64 // world_size, *shape, dtype=torch.bfloat16)
            setattr(layer, name, torch.nn.Parameter(weight))
        sizes = ExpertSizes(experts=64, chosen=8, hidden=2048, inner=1024)
        reports = reports_of(layer, *_given(tokens // world_size, sizes, trained), schedule="auto")
    assert len(reports) == 1 + trained
    for report in reports:
        (site,) = report.sites
        assert [p.schedule for p in site.decision.plan] == [schedule]
        if schedule == "keep":
            assert site.decision.reasons[0].code == "host_bound"

"""Uneven shards before a reduce-scatter: padded by the framework, seen through, and left as they were where nothing is overlapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Shard

from overlap_inductor.report import OverlapReport
from tests.compile.spellings import world
from tests.fake_group import fake_group
from tests.fake_group import reduce_scatter
from tests.fake_group import report_of
from tests.graph_text import waste


def dtensor(rank: int, dim: int, shape: tuple[int, ...], **fields: str) -> OverlapReport:
    with fake_group(4, rank), torch.no_grad():
        mesh = init_device_mesh("cpu", (4,))

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x @ w, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(dim)]).to_local()

        return report_of(fn, torch.randn(shape), torch.randn(16, 10), **fields)


@pytest.mark.parametrize(
    ("dim", "shape", "padded"),
    [(0, (33, 16), "[9, 36]"), (1, (2, 33, 16), "[9, 36]"), (1, (33, 16), "[3, 12]"), (0, (5, 16), "[2, 8]")],
    ids=["rows", "sequence, batch 2", "columns", "ranks without a row"],
)
def test_dtensor_shards_of_uneven_size(dim: int, shape: tuple[int, ...], padded: str) -> None:
    """A token count that is no multiple of the ranks would lose every sequence-parallel site, or another one on each rank."""
    reports = [dtensor(rank, dim, shape) for rank in (0, 3)]
    for report in reports:
        assert [(s.facts.pattern, s.decision.status) for s in report.sites] == [("matmul_reduce_scatter", "overlapped")], report.near_misses
        assert waste(report) == []
        assert report.after.count("aten.constant_pad_nd.default(") == 1
    # (The graphs differ by DTensor's own cut, which only the ranks with padding have.)
    assert reports[0].plan_hash == reports[1].plan_hash


def test_nothing_is_moved_where_nothing_is_overlapped() -> None:
    """Kept means untouched: a padding that was moved for the sake of the search must be put back."""
    for fields in ({"schedule": "auto"}, {"mode": "report"}, {"patterns": "matmul_all_reduce"}):
        report = dtensor(0, 0, (33, 16), **fields)
        assert [s.decision.status for s in report.sites] == ["kept"]
        assert report.after == report.before


LOOKALIKES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "ones": lambda x, w: reduce_scatter(F.pad(x @ w, (0, 0, 0, 1), value=1.0), "sum", 0, world()),
    "in front": lambda x, w: reduce_scatter(F.pad(x @ w, (0, 0, 1, 0)), "sum", 0, world()),
    "two dims": lambda x, w: reduce_scatter(F.pad(x @ w, (0, 1, 0, 1)), "sum", 0, world()),
    "a bias": lambda x, w: reduce_scatter(F.pad(torch.addmm(w[0], x, w), (0, 0, 0, 1)), "sum", 0, world()),
    "a piece in the middle": lambda x, w: (lambda y: reduce_scatter(torch.cat([F.pad(y[:3], (0, 0, 0, 1)), y[3:]]), "sum", 0, world()))(x @ w),
    "pieces out of order": lambda x, w: (lambda y: reduce_scatter(torch.cat([y[4:], F.pad(y[:4], (0, 0, 0, 1))]), "sum", 0, world()))(x @ w),
    "the result is used too": lambda x, w: (lambda y: (reduce_scatter(F.pad(y, (0, 0, 0, 1)), "sum", 0, world()), y.sum()))(x @ w),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_what_is_no_padding_of_shards(kind: str) -> None:
    """Zeros elsewhere, or a result that others read: moved up they would be other numbers, or a matmul computed twice."""
    with fake_group(2), torch.no_grad():
        report = report_of(LOOKALIKES[kind], torch.randn(7, 16), torch.randn(16, 8))
    assert [s.decision.status for s in report.sites if s.decision.status == "overlapped"] == []
    assert report.after == report.before

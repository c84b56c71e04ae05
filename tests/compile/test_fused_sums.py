# SPDX-License-Identifier: Apache-2.0
"""Autotuning may write a sum of two matmuls as one node. The pass splits this node into two matmuls. If the sum is not
overlapped, the pass fuses the matmuls again."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from overlap_inductor.passes import fused_sums
from overlap_inductor.passes import overlap_pass
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.spellings import world

Function = Callable[..., torch.Tensor]
FUNCTIONS: dict[str, tuple[Function, int]] = {
    "scatter": (lambda x, w, y, v: reduce_scatter(x @ w + y @ v, "sum", 0, world()), 2),
    "all-reduce behind a cast": (lambda x, w, y, v: all_reduce((x @ w + y @ v).double(), "sum", world()), 2),
    "three": (lambda x, w, y, v: reduce_scatter(x @ w + y @ v + x.relu() @ w, "sum", 0, world()), 3),
}


def report(function: Function, **fields: object) -> OverlapReport:
    inputs = torch.randn(16, 24), torch.randn(24, 8), torch.randn(16, 12), torch.randn(12, 8)
    with torch._inductor.config.patch(max_autotune=True):
        (found,) = reports_of(function, *inputs, **fields)
    return found


@pytest.fixture(autouse=True)
def two_ranks() -> object:
    with fake_group(2):
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_product_is_multiplied_in_pieces(name: str) -> None:
    function, count = FUNCTIONS[name]
    found = report(function)
    (site,) = found.sites
    assert site.decision.status == "overlapped" and len(site.facts.matmuls) == count and not found.near_misses
    assert "mm_plus_mm" not in found.after and "_c10d_functional" not in found.after
    # Each product has at least one matmul for each of the two ranks' slices.
    assert len(re.findall(r"= aten\.(?:add)?mm\.default", found.after)) >= 2 * count


@pytest.mark.parametrize("fields", [{"schedule": "keep"}, {"mode": "report"}], ids=["kept", "reported"])
def test_a_sum_that_is_kept_stays_one_kernel(fields: dict[str, object]) -> None:
    found = report(FUNCTIONS["scatter"][0], **fields)
    assert len(found.sites[0].facts.matmuls) == 2 and found.sites[0].decision.status == "kept"
    assert "mm_plus_mm" in found.after and "aten.mm.default" not in found.after


def test_a_rewrite_that_fails_leaves_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is restored from a copy with nodes of its own. There, too, the sum must be one kernel."""

    def fail(self: object, chosen: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(overlap_pass.Rewriter, "apply", fail)
    found = report(FUNCTIONS["scatter"][0])
    assert (
        found.sites[0].decision.status == "failed"
        and "mm_plus_mm" in found.after
        and "aten.mm.default" not in found.after
    )


def test_a_sum_beside_no_collective_stays_one_kernel() -> None:
    found = report(lambda x, w, y, v: torch.softmax(x @ w + y @ v, 1) + all_reduce(x @ w, "sum", world()))
    assert found.sites[0].decision.status == "overlapped" and "mm_plus_mm" in found.after


@pytest.mark.parametrize("schedule", ["ring", "keep"])
def test_gathered_operands_are_found(schedule: str) -> None:
    """The gathered tensor is multiplied by a weight and by the first matrix of an adapter. Both matmuls belong to one
    site."""

    def adapted(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(x, 0, world())
        return gathered @ w + (gathered @ v.t() @ y.t()) @ w[:16]

    inputs = torch.randn(16, 24), torch.randn(24, 8), torch.randn(16, 12), torch.randn(12, 24)
    with torch._inductor.config.patch(max_autotune=True):
        (found,) = reports_of(adapted, *inputs, schedule=schedule)
    (site,) = found.sites
    assert site.facts.pattern == "all_gather_matmul" and len(site.facts.matmuls) == 2 and not found.near_misses
    assert ("mm_plus_mm" in found.after) == (schedule == "keep")


def test_it_compiles_and_runs_as_kept() -> None:
    """The pass fuses the kept sum into one node again. Inductor can lower this node."""
    x, w, y, v = torch.randn(16, 24), torch.randn(24, 8), torch.randn(16, 12), torch.randn(12, 8)
    with torch._inductor.config.patch(max_autotune=True):
        out = torch.compile(FUNCTIONS["scatter"][0], backend="overlap_inductor", options={"schedule": "keep"})(
            x, w, y, v
        )
    assert out.shape == (8, 8) and reporting.last_report() is not None


def test_a_sum_that_cannot_be_taken_apart_leaves_the_graph_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two sums cannot be split, the first sum is fused again."""
    computed: list[object] = []
    plain = fused_sums.computed

    def fail(operator: object, *values: object) -> object:
        computed.append(operator)
        if len(computed) == 5:
            raise RuntimeError("on purpose")
        return plain(operator, *values)

    monkeypatch.setattr(fused_sums, "computed", fail)
    after: list[str] = []
    inner = overlap_pass.fused_sums.put_back
    monkeypatch.setattr(
        overlap_pass.fused_sums, "put_back", lambda graph: (inner(graph), after.append(overlap_pass.readable(graph)))
    )
    found = report(
        lambda x, w, y, v: (
            reduce_scatter(x @ w + y @ v, "sum", 0, world()) * reduce_scatter(y @ v + x.relu() @ w, "sum", 0, world())
        )
    )
    assert "on purpose" in found.notices[0]
    assert after[-1].count("= mm_plus_mm(") == 2 and "aten.mm.default" not in after[-1]

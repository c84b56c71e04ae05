# SPDX-License-Identifier: Apache-2.0
"""``explain`` returns the reports of a compile. It runs no kernel, and leaves no report, counters or files behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overlap_inductor
from overlap_inductor import OverlapConfig
from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.explain import Explanation
from tests.compile.fake_pass import calls
from tests.compile.fake_pass import count
from tests.compile.fake_pass import fake as fake

pytestmark = pytest.mark.usefixtures("fake")


@torch.library.custom_op("overlap_inductor_tests::explode", mutates_args=())
def explode(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a kernel ran")


@explode.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def phases(explanation: Explanation) -> list[tuple[str, str, int]]:
    return [(r.graph, r.phase, len(r.sites)) for r in explanation.reports]


def test_inference() -> None:
    assert phases(overlap_inductor.explain(lambda x: x @ x @ x, torch.ones(2, 2))) == [("0_0", "inference", 2)]


def test_no_kernel_runs() -> None:
    found = overlap_inductor.explain(lambda x: explode(x @ x) @ x, torch.ones(2, 2))
    assert phases(found) == [("0_0", "inference", 2)]


def test_forward_and_backward_without_a_backward_call() -> None:
    model = torch.nn.Linear(2, 2)
    found = overlap_inductor.explain(lambda x: model(x) @ x, torch.ones(2, 2))
    assert [r.phase for r in found.reports] == ["forward", "backward"]
    assert all(r.sites for r in found.reports)
    assert model.weight.grad is None


def test_graph_breaks_give_a_report_each() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ y @ y

    assert [r.phase + str(len(r.sites)) for r in overlap_inductor.explain(fn, torch.ones(2, 2)).reports] == [
        "inference1",
        "inference2",
    ]


def test_symbolic_sizes_reach_the_code_between_graphs_as_they_are() -> None:
    """``explain`` gives zeros to the code after a graph break. With zeros of a wrong shape, this code would fail or
    take another branch."""
    shapes = []

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x @ w, x @ w])
        torch._dynamo.graph_break()
        shapes.append(tuple(y.shape))
        return y.t() @ y

    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    found = overlap_inductor.explain(fn, x, torch.ones(3, 4))
    assert shapes == [(10, 4)]
    assert len(found.reports) == 2


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    overlap_inductor.enable(dump=str(tmp_path / "dump"), mode="strict")
    overlap_inductor.explain(lambda x: x @ x, torch.ones(2, 2))
    assert reporting.last_report() is None and count() == {} and not (tmp_path / "dump").exists()
    calls.clear()
    torch.compile(lambda x: x @ x)(torch.ones(2, 2))
    assert len(calls) == 1 and reporting.last_report() is not None


def test_config() -> None:
    """Without ``config``, ``explain`` uses the active configuration. It treats mode ``off``, which finds no site, as
    ``report``."""
    overlap_inductor.explain(lambda x: x @ x, torch.ones(2, 2), config=OverlapConfig(schedule="ring"))
    overlap_inductor.explain(lambda x: x @ x, torch.ones(2, 2), config=OverlapConfig(mode="off"))
    overlap_inductor.enable(sub_chunks=2)
    overlap_inductor.explain(lambda x: x @ x, torch.ones(2, 2))
    assert [(c.schedule, c.mode, c.sub_chunks) for c, _, _ in calls] == [
        ("ring", "on", "auto"),
        ("auto", "report", "auto"),
        ("auto", "on", 2),
    ]


def test_a_model_that_is_already_compiled_is_explained_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).requires_grad_(False)
    assert len(overlap_inductor.explain(torch.compile(model), torch.ones(1, 2)).reports) == 1
    for layer in model:
        layer.compile()
    assert len(overlap_inductor.explain(model, torch.ones(1, 2)).reports) == 1
    assert all(layer._compiled_call_impl is not None for layer in model)


def test_twice_gives_the_same() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    first = overlap_inductor.explain(fn, torch.ones(2, 2))
    second = overlap_inductor.explain(fn, torch.ones(2, 2))
    assert [r.to_json(graphs=True) for r in first.reports] == [r.to_json(graphs=True) for r in second.reports] != []


def test_text() -> None:
    assert "matmul_all_reduce" in str(overlap_inductor.explain(lambda x: x @ x, torch.ones(2, 2)))
    assert str(overlap_inductor.explain(lambda: 1)).startswith("No graph was compiled: ")

# SPDX-License-Identifier: Apache-2.0
"""The plain program of a graph is kept as bytes. It is compiled if it must replace the overlapped program."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx

import overlap_inductor
from overlap_inductor.inductor import compared_call
from overlap_inductor.inductor import plain_program
from overlap_inductor.report import publish as reporting
from overlap_inductor.runtime import agreement
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.fake_group import fake_group


@contextmanager
def _no_caches() -> Iterator[None]:
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def ranks_differ(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every graph runs its plain program. Returns the compiled plain programs, in order."""
    compiled: list[Any] = []
    compile_plain = plain_program.compile_plain

    def noted(*args: Any) -> Any:
        compiled.append(compile_plain(*args))
        return compiled[-1]

    monkeypatch.setattr(plain_program, "compile_plain", noted)
    monkeypatch.setattr(agreement.Comparison, "call", lambda self: agreement.Outcome(False, "they differ"))
    with _no_caches(), fake_group(2):
        yield compiled


def _group() -> Any:
    return torch.distributed.group.WORLD


TABLE = torch.arange(7.0)


def _plain(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return all_reduce(torch.relu(all_gather(x, 0, _group()) @ a) @ b, "sum", _group())


def _with_a_constant(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _plain(x, a, b) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])


def _with_a_branch(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = _plain(x, a, b)
    return torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,))


def _with_a_size_of_the_run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = _plain(x, a, b)
    return y[torch.nonzero(y.sum(1) == y.sum(1)).squeeze(1)]


QUICK = [(_with_a_constant, False), (_with_a_branch, False), (_with_a_size_of_the_run, True)]
"""The programs that ``make test`` runs here, and whether their sizes are dynamic. ``_plain`` is left out, because other
tests of this file run it."""


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        pytest.param(function, dynamic, marks=[] if (function, dynamic) in QUICK else [pytest.mark.thorough])
        for function in (_plain, _with_a_constant, _with_a_branch, _with_a_size_of_the_run)
        for dynamic in (False, True)
    ],
)
def test_the_plain_program_runs_the_collectives_as_written(
    function: Callable[..., Any], dynamic: bool, ranks_differ: list[Any]
) -> None:
    """The test checks sizes and code, because the fake group's collectives return uninitialised memory."""
    inputs = [torch.randn(6, 8), torch.randn(8, 5), torch.randn(5, 7)]
    # With static sizes, generated code calls ATen, which saves a second of building C++. With dynamic sizes, these
    # calls would make some sizes static.
    aten_only = torch._inductor.config.patch(fallback_by_default=not dynamic)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), aten_only:
        with overlap_inductor.overlap(schedule="ring"):
            reporting.forget_reports()
            found = torch.compile(function, dynamic=dynamic)(*inputs)
            reports = reporting.all_reports()
    assert found.shape[1:] == (7,)
    _check_plain(ranks_differ, reports)


def _check_plain(ranks_differ: list[Any], reports: list[Any]) -> None:
    assert sum(r.counters()["sites_overlapped"] for r in reports) == 2 and all(
        r.notices == ["they differ"] for r in reports
    )
    assert len(ranks_differ) == 1
    code = ranks_differ[0][0].source_code
    assert "all_gather_into_tensor" in code and "all_reduce" in code and "torch.ops.overlap_inductor" not in code


def test_one_plain_program_serves_several_sizes(ranks_differ: list[Any]) -> None:
    inputs = [torch.randn(8, 5), torch.randn(5, 7)]
    with overlap_inductor.overlap(schedule="ring"):
        reporting.forget_reports()
        compiled = torch.compile(_plain, dynamic=True)
        assert compiled(torch.randn(6, 8), *inputs).shape == (12, 7)
        _check_plain(ranks_differ, reporting.all_reports())
        assert [compiled(torch.randn(n, 8), *inputs).shape for n in (9, 20)] == [(18, 7), (40, 7)]
    assert len(ranks_differ) == 1


def test_a_backward_finds_what_its_forward_would_have_saved(ranks_differ: list[Any]) -> None:
    inputs = [
        torch.randn(6, 8, requires_grad=True),
        torch.randn(8, 5, requires_grad=True),
        torch.randn(5, 7, requires_grad=True),
    ]
    with overlap_inductor.overlap(schedule="ring"):
        torch.compile(_plain, dynamic=False)(*inputs).sum().backward()
    assert len(ranks_differ) == 2 and [i.grad is not None and i.grad.shape == i.shape for i in inputs] == [True] * 3


def test_results_have_the_strides_that_were_promised() -> None:
    """The backward was compiled for the strides of the overlapped graph's results. So the plain program's results
    must have these strides."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    s0 = ShapeEnv().create_unbacked_symint()
    examples = [s0, None]

    class Compiled:
        output_strides = [("4", "1"), None, ("4", "1")]

        def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
            return inputs[1], inputs[1].t(), inputs[1] + 1

    x = torch.randn(3, 4)
    run = plain_program.restrided(Compiled(), examples, [("4", "1"), None, ("1", str(s0))])
    same, other, turned = run([3, x])
    assert same is x and other.stride() == (1, 4) and turned.stride() == (1, 3) and torch.equal(turned, x + 1)
    plain = Compiled()
    assert plain_program.restrided(plain, examples, Compiled.output_strides) is plain


def test_a_large_tensor_is_taken_from_the_graph_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_program, "LARGE", 16)
    graph = fx.Graph()
    x, w, c = graph.placeholder("x"), graph.get_attr("w"), graph.get_attr("c")
    graph.output(
        (graph.call_function(torch.ops.aten.add.Tensor, (graph.call_function(torch.ops.aten.mul.Tensor, (x, w)), c)),)
    )
    gm = fx.GraphModule({"w": torch.arange(8.0), "c": torch.tensor(2.0)}, graph)
    program = plain_program._written(gm)
    kept = plain_program.capture(gm, [])
    names = kept.left_out
    assert names == ["w"] and len(kept.data) > 0 and kept.process is None
    large = plain_program.left_out(gm, names)
    assert large["w"] is gm.w
    (found,) = plain_program._rebuilt(program, large)(torch.ones(8))
    assert torch.equal(found, torch.arange(8.0) + 2)
    with pytest.raises(overlap_inductor.errors.OverlapError, match="w was too large to be kept"):
        plain_program._rebuilt(program, {})


def test_without_a_plain_program_nothing_is_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plain program, the graph could not run if ranks differ. So no site is overlapped."""

    def fails(*args: Any) -> Any:
        raise TypeError("cannot pickle this")

    monkeypatch.setattr(plain_program, "capture", fails)
    with _no_caches(), fake_group(2), overlap_inductor.overlap(schedule="ring"):
        torch.compile(_plain, dynamic=False)(torch.randn(6, 8), torch.randn(8, 5), torch.randn(5, 7))
        report = overlap_inductor.last_report()
    assert report is not None and {s.decision.status for s in report.sites} == {"refused"}
    assert "cannot pickle this" in report.sites[0].decision.reasons[0].text


def test_a_call_whose_plan_is_settled_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ranks agree on a plan, a call must not parse text or read the store."""
    from overlap_inductor.facts.exchange import ExchangePlan
    from overlap_inductor.report.report import OverlapReport

    with fake_group(2) as group:
        monkeypatch.setattr(agreement, "moves_nothing", lambda group: False)
        plan = ExchangePlan("1", "on", ("g0: all_reduce float32 [4]",), True)
        report = OverlapReport("1", "t", "on", "", "", 2, exchange=plan.to_json(), groups={group.group_name: []})
        call = compared_call.ComparedCall(lambda inputs: "overlapped", [report], None, True, None)
        agreement.state_of(group).agreed.add(plan.digest)
        assert call([]) == "overlapped" and agreement.state_of(group).calls == 1
        monkeypatch.setattr(agreement.Comparison, "call", lambda self: pytest.fail("asked again"))
        assert [call([]) for _ in range(3)] == ["overlapped"] * 3 and agreement.state_of(group).calls == 4
        monkeypatch.undo()
        monkeypatch.setattr(agreement, "moves_nothing", lambda group: False)
        agreement.state_of(group).apart = "a rank is off"
        assert not call.by_digest[plan.digest].count()


def test_a_dry_run_of_kernels_runs_the_plain_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run, one process plans for GPUs as one rank of many. Kernels cannot run, because the other ranks do not
    exist."""
    from overlap_inductor.facts.exchange import ExchangePlan
    from overlap_inductor.report.report import OverlapReport

    with fake_group(8) as group:
        plan = ExchangePlan("1", "strict", ("g0: all_reduce float32 [4] in matmul_all_reduce by fused/sm_push",), True)
        report = OverlapReport(
            "1",
            "t",
            "strict",
            "",
            "",
            8,
            exchange=plan.to_json(),
            groups={group.group_name: ['[["site", 4096, 4]]', 1]},
        )
        program = compared_call.PlainProgram(b"", {}, {}, {}, None)
        monkeypatch.setattr(compared_call.PlainProgram, "compile", lambda self: lambda inputs: "plain")
        call = compared_call.ComparedCall(lambda inputs: "overlapped", [report], program, True, None)
        assert [call([]) for _ in range(2)] == ["plain", "plain"] and len(report.notices) == 1


def test_a_size_that_the_plain_program_was_not_compiled_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain program's compile may add guards that the overlapped program does not have."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(64, ConstantSource("rows"), DimDynamic.DYNAMIC)
    rows = env.create_symintnode(symbol, hint=64, source=ConstantSource("rows"))
    plain = lambda inputs: inputs[0]  # noqa: E731
    assert bool(rows < 1000)
    run = plain_program.guarded(plain, [rows])
    assert run([10]) == 10 and run([999]) == 999
    with pytest.raises(overlap_inductor.errors.OverlapError, match="1000"):
        run([1000])
    assert plain_program.guarded(plain, [torch.ones(1)]) is plain


def test_a_captured_program_of_another_process_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    gm = fx.GraphModule({}, graph)
    kept = plain_program.capture(gm, [])
    assert plain_program.of_this_process(kept, None, []) is kept
    other = plain_program.Captured(b"", [], "another process")
    assert plain_program.of_this_process(other, None, []) is None
    again = plain_program.of_this_process(other, gm, [])
    assert again is not None and again.data

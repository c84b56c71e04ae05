# SPDX-License-Identifier: Apache-2.0
"""Symbolic dims: the pass must not tie the graph to the sizes of the inputs with which it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from overlap_inductor import OverlapConfig
from overlap_inductor.passes.overlap_pass import run_overlap_pass
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.compile.readings import facts
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.hand_graph import HandGraph
from tests.support.spellings import world


@pytest.mark.parametrize("kind", ["gather", "gather inner dim", "reduce", "scatter", "head"])
def test_rows_that_are_a_product_of_symbols(kind: str) -> None:
    """If batch and tokens are dynamic, M is ``s0*s1``. No rewrite may need the value of M, or add a guard that other
    sizes violate."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 6, 16, dynamic=(0, 1))
        w = made.input(16, 8, name="w")
        batch, tokens, _ = x.meta["val"].shape
        if kind.startswith("gather"):
            gathered = made.gather_on(x, 1) if kind == "gather inner dim" else made.gather(x)
            sizes = gathered.meta["val"].shape
            result = made.mm(made.view(gathered, sizes[0] * sizes[1], 16), w)
        else:
            y = made.mm(made.view(x, batch * tokens, 16), w)
            collective = {"reduce": made.reduce, "scatter": made.scatter, "head": made.gather}[kind]
            result = collective(made.view(y, batch, tokens, 8) if kind == "reduce" else y)
        made.output(result)
        report = made.run(sub_chunks=2)
        for guard in made.shapes.guards:
            for rows, columns in ((4, 6), (6, 8), (10, 12), (32, 200)):
                assert guard.expr.subs({batch.node.expr: rows, tokens.node.expr: columns}), guard
    assert [f[2] for f in facts(report)] == ["overlapped"], (report.notices, report.near_misses)
    assert "*" in str(report.sites[0].facts.matmuls[0].m)


def test_two_dynamic_dims_when_traced() -> None:
    """M is a product of two symbols."""
    with fake_group(2), torch.no_grad():
        x = torch.randn(4, 6, 16)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        report = report_of(lambda x, w: all_reduce(x @ w, "sum", world()), x, torch.randn(16, 8))
    assert facts(report) == [("matmul_all_reduce", ["mm M"], "overlapped")]
    assert "*" in str(report.sites[0].facts.matmuls[0].m)


def test_dynamic_shapes_compile_once() -> None:
    """If the pass added a guard, a new token count could cause a new compile on some ranks only."""
    from torch._dynamo.testing import CompileCounter
    from torch._functorch.aot_autograd import aot_module_simplified

    reports: list[OverlapReport] = []
    frames = CompileCounter()

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        frames(module, inputs)

        def lower(lowered: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            # Run the pass on a copy, and then return the plain graph. A guard that the pass adds also holds for the
            # plain graph, because the copy has the same symbols.
            copied = torch.fx.GraphModule(lowered, torch.fx.Graph())
            copied.graph.output(copied.graph.graph_copy(lowered.graph, {}))
            for node, twin in zip(lowered.graph.nodes, copied.graph.nodes, strict=True):
                twin.meta = dict(node.meta)
            reports.append(
                run_overlap_pass(copied.graph, OverlapConfig(schedule="ring", sub_chunks=2), is_inference=True)
            )
            return lowered.forward

        return aot_module_simplified(module, inputs, fw_compiler=lower)

    with fake_group(2), torch.no_grad():
        fn = torch.compile(lambda x, w: all_gather(x, 0, world()) @ w, backend=backend)
        w = torch.randn(16, 8)
        for tokens in (6, 10, 7, 128):
            x = torch.randn(tokens, 16)
            torch._dynamo.mark_dynamic(x, 0)
            fn(x, w)
    assert frames.frame_count == 1
    (report,) = reports
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")], report.notices


def test_no_run_time_threshold_for_a_looping_op_that_scatters_columns() -> None:
    """With dynamic tokens, ``auto`` may give an op a threshold: from this number of tokens on, the op runs the ring. A
    looping op that scatters columns would compare the threshold with a number of columns. So ``auto`` keeps the
    site."""
    with fake_group(2):
        for schedule, status, reasons in (("auto", "kept", ["dynamic_shape"]), ("ring", "overlapped", [])):
            made = HandGraph()
            x, w = made.input(2**14, 128, dynamic=(0,)), made.input(128, 8192, name="w")
            made.output(made.scatter_on(made.mm(x, w), 1))
            (site,) = made.run(schedule=schedule, step_node_budget=1).sites
            assert site.decision.status == status and [r.code for r in site.decision.reasons] == reasons, (
                site.decision.reasons
            )


def packed(made: HandGraph, node: Any) -> bool:
    """``node``: takes an emitter and adds a node. Returns whether a reshape of this node first copies it to contiguous
    memory."""
    emit = StepEmitter(made.graph, "0", 2, "site", made.graph.call_function(torch.ops.aten.zeros.default), {})
    first = emit.reshape(node(emit), [-1]).args[0]
    return first.target is torch.ops.overlap_inductor.packed.default


def test_a_slice_with_gaps_is_copied_before_a_reshape() -> None:
    """A slice of a slice is also copied if one of the two has gaps. A slice without gaps or of static sizes is not
    copied."""
    with fake_group(2):
        made = HandGraph()
        x, fixed = made.input(4, 6, 16, dynamic=(1,)), made.input(4, 6, 16, name="fixed")
        half = x.meta["val"].shape[1] // 2
        assert packed(made, lambda e: e.take(x, 1, 0, half, 0, half))
        assert packed(made, lambda e: e.narrow(e.take(x, 1, 0, half, 0, half), 0, 0, 2))
        assert packed(
            made, lambda e: e.call(torch.ops.overlap_inductor.narrow.default, e.take(x, 1, 0, half, 0, half), 0, 0, 2)
        )
        assert not packed(made, lambda e: e.take(x, 0, 0, 2, 0, 2))
        assert not packed(made, lambda e: e.take(fixed, 1, 0, 3, 0, 3))

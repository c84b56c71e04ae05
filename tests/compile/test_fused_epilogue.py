# SPDX-License-Identifier: Apache-2.0
"""Pointwise ops after fused sites. Some become an epilogue, and then need no kernel of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import overlap_inductor
from overlap_inductor.inductor import compared_call
from overlap_inductor.lowerings import group_ops
from overlap_inductor.lowerings.fused import ops as fused_ops
from overlap_inductor.lowerings.fused import tails
from overlap_inductor.lowerings.one_op import ops as site_ops
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from overlap_inductor.runtime import agreement
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.generated_code import code_of
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

BF16 = torch.bfloat16
ROWS, K, N = 24, 16, 40


pytestmark = pytest.mark.usefixtures("reachable")


def planned(report: OverlapReport) -> list[list[str] | None]:
    assert [p.schedule for s in report.sites for p in s.decision.plan] == ["fused"] * len(report.sites), report.notices
    return [p.parameters.get("epilogue") for s in report.sites for p in s.decision.plan]


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "relu": (torch.relu, "relu"),
    "squared relu": (lambda y: torch.relu(y) ** 2, "relu mul"),
    "sigmoid": (torch.sigmoid, "sigmoid"),
    "scaled, clamped, shifted": (lambda y: (y * 3).clamp(-1, 1) - 0.5, "mul maximum minimum sub"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_a_model(name: str, two: None) -> None:
    """An activation after a linear layer on a batch of sequences becomes an epilogue."""
    function, expected = ACTIVATIONS[name]
    group = torch.distributed.group.WORLD
    ((found,),) = planned(
        report_of(
            lambda x, w: function(F.linear(all_gather(x, 1, group), w)),
            half(1, ROWS, K),
            half(N, K),
            schedule="fused",
            mode="strict",
        )
    )  # type: ignore[misc]
    assert [name for name in re.findall(r"(\w+)\(", found) if name != "to"] == expected.split(), found


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_which_takes_longer_on_tiles_is_not_an_epilogue(approximate: str, two: None) -> None:
    group = torch.distributed.group.WORLD
    found = planned(
        report_of(
            lambda x, w: F.gelu(F.linear(all_gather(x, 0, group), w), approximate=approximate),
            half(ROWS, K),
            half(N, K),
            schedule="fused",
            mode="strict",
        )
    )
    assert found == [None]


def test_silu_alone_and_a_gated_product(two: None) -> None:
    """A ``silu`` alone becomes an epilogue. The product ``silu(a) * b`` needs two matmuls, so Inductor's kernel
    computes it, with the ``silu``."""
    group = torch.distributed.group.WORLD
    x, gate, up = half(ROWS, K), half(N, K), half(N, K)
    (alone,) = planned(
        report_of(lambda x, a: F.silu(all_gather(x, 0, group) @ a.t()), x, gate, schedule="fused", mode="strict")
    )
    assert alone is not None and re.search(r"exp|sigmoid", alone[0])

    def gated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = all_gather(x, 0, group)
        return F.silu(y @ a.t()) * (y @ b.t())

    assert planned(report_of(gated, x, gate, up, schedule="fused", mode="strict")) == [None]


def test_residuals_of_layers(two: None) -> None:
    """An all-reduce is added to the residual stream, and the sum becomes an epilogue. The kernel stores the sum,
    because the next norm and the next sum read it."""
    group = torch.distributed.group.WORLD
    weights = [half(K, N), half(N, K)]

    def layers(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            residual = residual + all_reduce(x @ weights[0], "sum", group)
            x = F.rms_norm(residual, (N,)) @ weights[1]
        return residual + x @ weights[0]

    assert (
        planned(report_of(layers, half(2, ROWS, K), half(2, ROWS, N), schedule="fused", mode="strict"))
        == [["e0 full: add(e0, x)"]] * 2
    )


class Hand:
    """A hand-written graph of a gather or a reduction. ``full`` has the shape of ``result``. ``row`` has the shape of a
    row of ``result``."""

    def __init__(self, kind: str = "gather") -> None:
        self.g = HandGraph()
        rows = ROWS * (1 if kind == "gather" else self.g.world_size)
        x, w = self.input(rows, K, name="x"), self.input(K, N, name="w")
        self.full, self.row = (
            self.input(ROWS * self.g.world_size if kind != "scatter" else ROWS, N, name="full"),
            self.input(N, name="row"),
        )
        self.result = self.g.mm(self.g.gather(x), w) if kind == "gather" else getattr(self.g, kind)(self.g.mm(x, w))

    def input(self, *shape: int, name: str, dtype: torch.dtype = BF16) -> fx.Node:
        return self.g.input(*shape, name=name, dtype=dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.g.call(target, *args, **kwargs)

    def relu(self, x: fx.Node | None = None) -> fx.Node:
        return self.call(aten.relu.default, x or self.result)

    def planned(self, *outputs: fx.Node) -> list[list[str] | None]:
        return planned(self.g.output(*outputs).run(schedule="fused", mode="strict"))


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_every_pattern_takes_extra_tensors(kind: str) -> None:
    with fake_group(2):
        h = Hand(kind)
        scaled = h.call(aten.mul.Tensor, h.result, h.row)
        assert h.planned(h.call(aten.add.Tensor, h.full, scaled)) == [["e0 row, e1 full: mul(x, e0), add(e1, t0)"]]


def left_alone() -> dict[str, Callable[[Hand], list[fx.Node]]]:
    def view(h: Hand, *shape: int) -> fx.Node:
        return h.g.view(h.result, *shape)

    return {
        "the result is read by others": lambda h: [h.relu(), h.result],
        "nothing but a view": lambda h: [view(h, 2, ROWS, N)],
        "a reduction reads it": lambda h: [h.call(aten.sum.dim_IntList, h.relu(), [1])],
        "alpha": lambda h: [h.call(aten.add.Tensor, h.result, h.full, alpha=2)],
        "a cube": lambda h: [h.call(aten.pow.Tensor_Scalar, h.result, 3)],
        "another op": lambda h: [h.call(aten.sin.default, h.result)],
        "an infinite number": lambda h: [h.call(aten.mul.Tensor, h.result, float("inf"))],
        "in fp32": lambda h: [
            h.call(torch.ops.prims.convert_element_type.default, h.relu(), torch.float32),
            h.call(aten.sum.default, h.relu()),
        ],
        "rows of another length": lambda h: [h.relu(view(h, 2 * ROWS * 2, N // 2))],
        "an extra tensor computed later": lambda h: [
            h.call(aten.add.Tensor, h.result, h.call(aten.neg.default, h.full))
        ],
        "an extra tensor of integers": lambda h: [
            h.call(aten.mul.Tensor, h.result, h.input(2 * ROWS, N, name="n", dtype=torch.int32))
        ],
        "an extra tensor that is transposed": lambda h: [
            h.call(aten.add.Tensor, h.result, h.call(aten.permute.default, h.input(N, 2 * ROWS, name="n"), [1, 0]))
        ],
        "the result is broadcast": lambda h: [h.call(aten.add.Tensor, h.input(3, 2 * ROWS, N, name="n"), h.result)],
    }


@pytest.mark.parametrize("name", left_alone())
def test_ops_that_do_not_become_an_epilogue(name: str) -> None:
    with fake_group(2):
        h = Hand()
        assert not any(h.planned(*left_alone()[name](h)))


def test_only_the_supported_part_of_a_chain_becomes_the_epilogue() -> None:
    """A matmul and an unsupported op read the supported part's result, so the kernel stores this result."""
    with fake_group(2):
        h = Hand()
        added = h.call(aten.add.Tensor, h.relu(), h.full)
        assert h.planned(h.call(aten.sin.default, added), h.g.mm(added, h.input(N, K, name="v"))) == [
            ["e0 full: relu(x), add(t0, e0)"]
        ]


def test_one_node_belongs_to_one_site() -> None:
    """A sum adds the relus of two reductions. The sum joins the second reduction's epilogue only if the first relu
    comes before the second reduction."""
    for early in (True, False):
        with fake_group(2):
            h = Hand("scatter")
            operands = h.input(2 * ROWS, K, name="y"), h.input(K, N, name="v")
            first = h.relu() if early else None
            other = h.g.scatter(h.g.mm(*operands))
            first = first or h.relu()
            total = h.call(aten.add.Tensor, first, h.relu(other))
            assert h.planned(total) == [None, ["e0 full: relu(x), add(e0, t0)"] if early else None]


def test_a_tensor_that_is_written_in_place_is_not_read_earlier() -> None:
    with fake_group(2):
        h = Hand()
        written = h.call(aten.copy_.default, h.full, h.call(aten.neg.default, h.full))
        assert h.planned(h.call(aten.add.Tensor, h.result, h.full), written) == [None]


def test_extra_tensors_of_all_weights_share_one_limit() -> None:
    with fake_group(2):
        g = HandGraph()
        gathered = g.gather(g.input(ROWS, K, dtype=BF16))
        rows = [g.input(N, name=f"row{i}", dtype=BF16) for i in range(3)]
        results = [g.mm(gathered, g.input(K, N, name=f"w{i}", dtype=BF16)) for i in range(3)]
        made = [g.call(aten.mul.Tensor, result, row) for result, row in zip(results, rows)]
        g.graph.output(tuple(made))
        # Move the inputs to the start, so that an epilogue's operands come before the gather.
        first = next(iter(g.graph.nodes))
        for node in reversed([n for n in g.graph.nodes if n.op == "placeholder"][1:]):
            first.append(node)
        g.module = fx.GraphModule(torch.nn.Module(), g.graph)
        assert planned(g.run(schedule="fused", mode="strict")) == [["e0 row: mul(x, e0)", "e0 row: mul(x, e0)", ""]]


def test_a_dynamic_token_count_leaves_pointwise_ops_to_inductor() -> None:
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(made.input(ROWS, K, dtype=BF16, dynamic=[0]))
        report = made.output(
            made.call(aten.relu.default, made.mm(gathered, made.input(K, N, name="w", dtype=BF16)))
        ).run(schedule="fused", mode="strict")
    assert all("epilogue" not in p.parameters for s in report.sites for p in s.decision.plan) and "relu" in report.after


def test_the_report_shows_the_epilogue() -> None:
    with fake_group(2):
        h = Hand()
        assert "epilogue=['relu(x)']" in render_text(h.g.output(h.relu()).run(schedule="fused", mode="strict"))


@pytest.mark.parametrize("epilogue", [True, False], ids=["as planned", "without epilogues"])
def test_the_number_of_kernels_beside_the_op(epilogue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op computes its epilogue. Without epilogues, each result needs one more kernel."""
    monkeypatch.setattr(agreement, "require", lambda group, plan: None)
    monkeypatch.setattr(group_ops, "prepare", lambda *arguments: None)
    monkeypatch.setattr(compared_call, "prepare", lambda *arguments: None)
    monkeypatch.setattr(compared_call, "is_fake", lambda group: False)
    for module in (fused_ops, site_ops):
        monkeypatch.setattr(module, "ready", lambda *arguments: None)
    if not epilogue:
        monkeypatch.setattr(tails, "find_tail", lambda *arguments, **keywords: None)
    with fake_group(2) as group, torch.no_grad():

        def mlp(x: torch.Tensor, a: torch.Tensor, bias: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return x + reduce_scatter(F.silu(torch.addmm(bias, all_gather(x, 0, group), a)) @ b, "sum", 0, group)

        with overlap_inductor.overlap(schedule="fused", mode="strict"):
            code = code_of(torch.compile(mlp), half(ROWS, K), half(K, N), half(N), half(N, K))
    call = code[code.index("def call(") :].split("runner = ")[0]
    assert len(re.findall(r"torch\.ops\.overlap_inductor\.fused_\w+\.default\(", call)) == 2
    assert len(re.findall(r"cpp_fused\w*\(", call)) == (0 if epilogue else 2), call


def after(h: Hand, *outputs: fx.Node) -> str:
    return h.g.output(*outputs).run(schedule="fused", mode="strict").after


def test_gather_golden() -> None:
    """The activation is gone from the graph. The output is a view of the op's result."""
    with fake_group(2):
        h = Hand()
        check_golden(after(h, h.relu(h.g.view(h.result, 2, ROWS, N))), "fused_epilogue/gather.txt")


def test_scatter_golden() -> None:
    with fake_group(2):
        h = Hand("scatter")
        check_golden(after(h, h.call(aten.add.Tensor, h.full, h.result)), "fused_epilogue/scatter.txt")


def test_reduce_golden() -> None:
    with fake_group(2):
        h = Hand("reduce")
        check_golden(after(h, h.call(aten.mul.Tensor, h.relu(), h.row)), "fused_epilogue/reduce.txt")

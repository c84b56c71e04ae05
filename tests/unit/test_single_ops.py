# SPDX-License-Identifier: Apache-2.0
"""Which ops are recognised in their decompositions, and whether both give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from overlap_inductor.sites.row_operands import operands_of
from overlap_inductor.sites.row_steps import is_pointwise_on_rows
from overlap_inductor.sites.single_ops import single_op

aten = torch.ops.aten
Rows = Callable[..., torch.Tensor]


def _decomposed(function: Rows, *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph after Inductor's decompositions."""
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


def _result(graph: fx.Graph) -> fx.Node:
    (found,) = graph.output_node().all_input_nodes
    return found


def _bf16(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).bfloat16()


def _every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def _silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return aten.silu_backward(gradient, x)


RECOGNISED: dict[str, tuple[Rows, int]] = {
    "aten.silu.default": (_silu, 1),
    "aten.silu_backward.default": (_silu_backward, 2),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_recognised_op_has_the_bits_of_its_decomposition(name: str) -> None:
    """For every bf16 number, NaN and infinities included. The gradients are random."""
    function, count = RECOGNISED[name]
    inputs = [*(_bf16(256, 256) for _ in range(count - 1)), _every_bf16()]
    module = _decomposed(function, *inputs)
    found = single_op(_result(module.graph))
    assert found is not None and found.name == name
    assert [n.name for n in found.inputs] == [n.name for n in module.graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(function(*inputs), module(*inputs), rtol=0, atol=0, equal_nan=True)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float()


LOOKALIKES: dict[str, tuple[Rows, torch.dtype]] = {
    "another dtype": (_silu, torch.float32),
    "another width": (_silu, torch.float16),
    "kept in fp32": (lambda x: _wide(x) / (1 + _wide(x).neg().exp()), torch.bfloat16),
    "another summand": (lambda x: (_wide(x) / (2 + _wide(x).neg().exp())).bfloat16(), torch.bfloat16),
    "another sign": (lambda x: (_wide(x) / (1 + _wide(x).exp())).bfloat16(), torch.bfloat16),
    "another numerator": (lambda x: (_wide(x + 1) / (1 + _wide(x).neg().exp())).bfloat16(), torch.bfloat16),
    "a scaled summand": (
        lambda x: (_wide(x) / torch.add(_wide(x).neg().exp(), 1, alpha=3)).bfloat16(),
        torch.bfloat16,
    ),
    "a sigmoid": (lambda x: x.sigmoid(), torch.bfloat16),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_other_ops_are_not_recognised(name: str) -> None:
    function, dtype = LOOKALIKES[name]
    module = _decomposed(function, torch.randn(4, 8).to(dtype))
    assert [n for n in module.graph.nodes if single_op(n) is not None] == []


def _steps(graph: fx.Graph, given: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are computed from ``given``, in graph order."""
    found = {given}
    for node in graph.nodes:
        if node.op == "call_function" and found.intersection(node.all_input_nodes):
            found.add(node)
            yield node


def _program(function: Rows, decompose: bool, handed_out: list[str]) -> tuple[list[str], list[str]]:
    """``(the ops of the program, its tensors of rows)`` of ``function(given, x)``. ``handed_out``: names of nodes that
    the program returns, too."""
    inputs = [_bf16(4, 8), _bf16(4, 8)]
    table = select_decomp_table() if decompose else None
    graph = make_fx(function, decomposition_table=table, tracing_mode="fake")(*inputs).graph
    given, _ = graph.find_nodes(op="placeholder")
    steps = list(_steps(graph, given))
    assert all(is_pointwise_on_rows(n, 4) for n in steps)
    found = operands_of([given], steps, given, _result(graph), [n for n in steps if n.name in handed_out])
    return [name.split(".")[1] for name, _, _ in found.program.ops], [n.name for n in found.rows]


@pytest.mark.parametrize("decompose", [False, True])
def test_an_activation_of_computed_rows_is_one_op(decompose: bool) -> None:
    def function(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _silu(given * x) * x

    assert _program(function, decompose, []) == (["mul", "silu", "mul"], ["x_1"])


def test_a_step_that_is_read_elsewhere_is_still_computed() -> None:
    def function(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _silu(given + x)

    ops, _ = _program(function, True, ["exp"])
    assert ops == ["add", "convert_element_type", "neg", "exp", "silu"]


def test_an_activation_of_other_rows_is_computed_with_each_piece() -> None:
    """If something else reads the activation, it is computed anyway. Then it is an input of the program."""

    def alone(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _silu(x) * given

    def shared(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = _silu(x)
        y.neg()
        return y * given

    assert _program(alone, True, []) == (["silu", "mul"], ["x_1"])
    ops, rows = _program(shared, True, [])
    assert ops == ["mul"] and rows != ["x_1"]

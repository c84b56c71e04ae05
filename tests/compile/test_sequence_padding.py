# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite for a symbolic number of tokens that the ranks do not divide. Matmuls beside the new
collectives multiply the rows beyond the last token too. Ops that mix rows must not read these rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import add
from operator import getitem
from operator import mul

import pytest
import torch
from torch import fx

from overlap_inductor.facts.machine import BOXES
from overlap_inductor.passes.sequence.sizes import SizeNodes
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat.target import planning_for
from tests.compile.scaled_graphs import FP8
from tests.compile.scaled_graphs import convert
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

TOKENS, H, OWN = 5, 16, 8
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
TOKEN_MIXERS = (aten.cumsum.default, aten.permute.default, aten.sum.dim_IntList)
Body = Callable[[HandGraph, fx.Node, dict[str, fx.Node]], fx.Node]


def _divided(body: Body) -> HandGraph:
    """The rewritten graph of ``body(made, rows, inputs)``. ``rows [T, H]`` is token-wise work behind an all-reduce."""
    made = HandGraph()
    inputs = {"x": made.input(TOKENS, H, name="x", dynamic=[0])}
    shapes = {"square": (H, H), "up": (H, OWN), "wide": (H, 2 * OWN), "down": (OWN, H), "bias": (OWN,)}
    inputs |= {name: made.input(*shape, name=name) for name, shape in shapes.items()}
    rows = made.call(aten.relu.default, made.reduce(made.mm(inputs["x"], inputs["square"])))
    made.output(body(made, rows, inputs))
    facts = made.divide()
    assert facts and all(f.status == "rewritten" for f in facts), facts
    return made


def _is_padded(made: HandGraph, node: fx.Node) -> bool:
    """Whether ``node`` has rows beyond the last token."""
    return not same_size(tools.shape(node)[0], tools.shape(next(iter(made.graph.nodes)))[0])


def _reduced(made: HandGraph, x: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    """Token-wise work behind the all-reduce of ``x @ down``, and the matmul behind this work."""
    total = made.reduce(made.mm(x, inputs["down"]))
    return made.mm(made.call(aten.relu.default, total), inputs["up"])


def _several_results(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    both = made.call(aten.split.Tensor, made.mm(rows, inputs["wide"]), OWN, 1)
    gate, up = (made.call(getitem, both, i) for i in range(2))
    return _reduced(made, made.call(aten.mul.Tensor, gate, up), inputs)


def _a_bias(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    return _reduced(made, made.call(aten.addmm.default, inputs["bias"], rows, inputs["up"]), inputs)


def _features_are_mixed(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    scores = made.call(aten._softmax.default, made.mm(rows, inputs["up"]), 1, False)
    return _reduced(made, scores, inputs)


def _tokens_are_mixed(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    return _reduced(made, made.call(aten.cumsum.default, made.mm(rows, inputs["up"]), 0), inputs)


def _a_gate_for_mixed_tokens(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    mixed = made.call(aten.cumsum.default, made.mm(rows, inputs["up"]), 0)
    return _reduced(made, made.call(aten.mul.Tensor, mixed, made.mm(rows, inputs["up"])), inputs)


def _tokens_are_contracted(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    up = made.mm(rows, inputs["up"])
    gradient = made.mm(made.call(aten.permute.default, rows, [1, 0]), up)
    return made.mm(_reduced(made, up, inputs), made.call(aten.permute.default, gradient, [1, 0]))


def _tokens_are_summed(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    up = made.mm(rows, inputs["up"])
    return made.call(aten.mul.Tensor, _reduced(made, up, inputs), made.call(aten.sum.dim_IntList, up, [0]))


def _a_bias_of_tokens(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    """The term ``x @ up @ down`` has no padding yet. The matmul in front of the reduction adds it to the other term."""
    up, down = inputs["up"], inputs["down"]
    other = made.mm(made.call(aten.cumsum.default, made.mm(inputs["x"], up), 0), down)
    total = made.reduce(made.call(aten.addmm.default, other, made.mm(rows, up), down))
    return made.mm(made.call(aten.relu.default, total), up)


def _two_scatters(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
    up = made.mm(rows, inputs["up"])
    total = made.call(aten.add.Tensor, made.mm(up, inputs["down"]), made.mm(rows, inputs["square"]))
    return made.mm(made.call(aten.relu.default, made.reduce(total)), inputs["up"])


@pytest.mark.parametrize(
    "body",
    [
        _several_results,
        _a_bias,
        _features_are_mixed,
        _tokens_are_mixed,
        _a_gate_for_mixed_tokens,
        _tokens_are_contracted,
        _tokens_are_summed,
        _two_scatters,
        _a_bias_of_tokens,
    ],
)
def test_sites_are_overlapped_and_tokens_are_mixed_without_the_padding(body: Body) -> None:
    with fake_group(2):
        made = _divided(body)
        mixers = [n for n in made.graph.nodes if n.target in TOKEN_MIXERS and _reads_activations(n)]
        assert not any(_is_padded(made, n.args[0]) for n in mixers), made.text()
        matmuls = [n for n in made.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
        assert sum(_is_padded(made, n) for n in matmuls) >= 4, made.text()
        report = made.run()
        found = Counter((s.facts.pattern, s.decision.status) for s in report.sites)
        assert found == {(GATHER, "overlapped"): 2, (SCATTER, "overlapped"): 2}, (found, report.near_misses)


def _reads_activations(node: fx.Node) -> bool:
    return not isinstance(tools.shape(node.args[0])[0], int)


def test_a_bias_for_each_token_keeps_the_matmul_as_written() -> None:
    """``addmm`` with a bias ``[T, N]`` that is not held with the padding."""

    def body(made: HandGraph, rows: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node:
        return made.call(aten.addmm.default, made.mm(inputs["x"], inputs["up"]), rows, inputs["up"])

    with fake_group(2):
        made = _divided(body)
        (matmul,) = (n for n in made.graph.nodes if n.target is aten.addmm.default)
        assert not _is_padded(made, matmul)


def test_a_number_that_the_ranks_divide_is_not_padded() -> None:
    with fake_group(5):
        made = _divided(_tokens_are_mixed)
        assert not any(n.target is aten.constant_pad_nd.default for n in made.graph.nodes)


def test_fp8_with_a_scale_for_each_token() -> None:
    """The quantised rows and their scales are gathered. The matmul reads both with the padding, and the second matmul
    pads both."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(TOKENS, 32, name="x", dtype=torch.bfloat16, dynamic=[0])
        w = made.input(32, 32, name="w", dtype=torch.bfloat16)
        narrow, scale = made.input(32, 32, name="narrow", dtype=FP8), made.input(1, 32, name="scale")

        def multiplied(rows: fx.Node) -> fx.Node:
            wide = made.call(convert, rows, torch.float32)
            largest = made.call(aten.amax.default, wide, [1], True)
            quantised = made.call(convert, made.call(aten.div.Tensor, wide, largest), FP8)
            columns = made.call(aten.permute.default, narrow, [1, 0])
            return made.call(aten._scaled_mm.default, quantised, columns, largest, scale, None, None, torch.bfloat16)

        first = multiplied(made.call(aten.relu.default, made.reduce(made.mm(x, w))))
        mixed = made.call(aten.cumsum.default, first, 0)
        made.output(made.call(aten.relu.default, made.reduce(multiplied(mixed))))
        assert [f.status for f in made.divide()] == ["rewritten", "rewritten"]
        matmuls = [n for n in made.graph.nodes if n.target is aten._scaled_mm.default]
        read = [i for n in matmuls for i in (n, n.args[0], n.args[2])]
        assert len(matmuls) == 2 and all(_is_padded(made, i) for i in read), made.text()
        assert Counter(s.facts.pattern for s in made.run(schedule="keep").sites) == {GATHER: 1, SCATTER: 2}


@pytest.mark.parametrize(("tokens", "again"), [(16384, 1), (16387, 0)])
def test_the_forward_saves_all_rows_where_the_backward_cannot_hide_a_gather(tokens: int, again: int) -> None:
    """The matmul of a weight's gradient contracts the tokens. With the padding, it would read rows beyond the last
    token, so it is not overlapped."""
    with fake_group(8), planning_for(BOXES["h200"]):
        made = HandGraph()
        count = tools.shape(made.input(tokens, 1, name="ids", dynamic=[0]))[0]
        shapes = {"x": (count, 1024), "w": (1024, 8192), "up": (8192, 4096), "tangents_1": (count, 4096)}
        x, w, up, tangents = (made.on("cuda", *s, dtype=torch.bfloat16, name=n) for n, s in shapes.items())
        rows = made.call(aten.relu.default, made.reduce(made.mm(x, w)))
        gradient = made.mm(made.call(aten.permute.default, rows, [1, 0]), tangents)
        made.output(made.mm(rows, up), gradient)
        (facts,) = made.divide(schedule="auto")
        assert (facts.status, facts.gathered_again) == ("rewritten", again)


def test_a_power_of_a_size_is_written_as_a_product() -> None:
    """If the first call has as many sequences as tokens in each sequence, torch gives both dims one symbol."""
    with fake_group(2):
        made = HandGraph()
        size = tools.shape(made.input(TOKENS, H, dynamic=[0]))[0]
        node = SizeNodes(made.graph).argument(size * size * size + 1)
        assert tools.value(node).node.expr == size.node.expr**3 + 1
        assert {n.target for n in made.graph.nodes if n.op == "call_function"} == {aten.sym_size.int, mul, add}

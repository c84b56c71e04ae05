# SPDX-License-Identifier: Apache-2.0
"""The rules of the sequence-parallel rewrite (``passes/sequence``), one op at a time.

An op is *held* if each rank computes it on its own rows. A held op must give the values that the op gives on all rows.
Reductions over all tokens may be computed in parts that the ranks combine (``SUMS``). Any other op must be refused with
a reason. ``x`` is ``[2, 7, 6]`` and computed from an all-reduce. Its 14 tokens divide evenly among 2 ranks, and
unevenly among 3.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from overlap_inductor.passes.sequence.sums import EXTREMA
from tests.support.fake_group import fake_group
from tests.support.hand_graph import getitem
from tests.support.token_graph import F64
from tests.support.token_graph import TokenGraph
from tests.support.token_graph import check_rewrite

B, S, H = 2, 7, 6
convert = torch.ops.prims.convert_element_type.default
Op = Callable[[TokenGraph, fx.Node], fx.Node]

HELD: dict[str, Op] = {
    # Elementwise ops, with and without broadcasting.
    "one input": lambda g, x: g.op("relu.default", x),
    "a number": lambda g, x: g.op("mul.Tensor", x, 2.5),
    "a tensor without dims": lambda g, x: g.op("mul.Tensor", x, g.same()),
    "cast": lambda g, x: g.call(convert, g.call(convert, x, torch.float32), F64),
    "weight [H]": lambda g, x: g.op("mul.Tensor", x, g.same(H)),
    "weight [1, 1, H]": lambda g, x: g.op("mul.Tensor", x, g.same(1, 1, H)),
    "weight on the left": lambda g, x: g.op("sub.Tensor", g.same(H), x),
    "one row for each batch [B, 1, H]": lambda g, x: g.op("add.Tensor", x, g.same(B, 1, H)),
    "positions [S, H]": lambda g, x: g.op("add.Tensor", x, g.same(S, H)),
    "positions [1, S, H]": lambda g, x: g.op("add.Tensor", x, g.same(1, S, H)),
    "positions [S, 1]": lambda g, x: g.op("mul.Tensor", x, g.same(S, 1)),
    "residual [B, S, H]": lambda g, x: g.op("add.Tensor", x, g.same(B, S, H)),
    "mask [B, S, 1]": lambda g, x: g.op("mul.Tensor", x, g.same(B, S, 1)),
    "other features [B, S, 1] to H": lambda g, x: g.op("mul.Tensor", g.op("slice.Tensor", x, 2, 0, 1), g.same(H)),
    "three inputs": lambda g, x: g.op("where.self", g.op("gt.Scalar", x, 0.0), x, g.op("mul.Tensor", x, 0.5)),
    "a computed operand": lambda g, x: g.op("mul.Tensor", x, g.op("exp.default", g.same(H))),
    "an operand with a leading dim": lambda g, x: g.op("add.Tensor", x, g.op("reshape.default", g.same(H), [1, 1, H])),
    "full_like": lambda g, x: g.op("add.Tensor", x, g.op("full_like.default", x, 3.0)),
    "zeros_like": lambda g, x: g.op("zeros_like.default", x),
    # Reductions over features.
    "mean": lambda g, x: g.op("mul.Tensor", x, g.op("mean.dim", x, [-1], True)),
    "sum without keepdim": lambda g, x: g.op("sum.dim_IntList", x, [2]),
    "sum with a dtype": lambda g, x: g.op("sum.dim_IntList", g.call(convert, x, torch.float32), [2], True, dtype=F64),
    "amax": lambda g, x: g.op("amax.default", x, [-1], True),
    "prod": lambda g, x: g.op("prod.dim_int", x, -1),
    "var": lambda g, x: g.op("var.correction", x, [2], correction=0, keepdim=True),
    "var_mean": lambda g, x: g.call(getitem, g.op("var_mean.correction", x, [2], correction=0, keepdim=True), 1),
    "all 3 equal slices": lambda g, x: g.op(
        "add.Tensor",
        g.op("slice.Tensor", x, 2, 2, 4),
        g.op("mul.Tensor", *(g.op("slice.Tensor", x, 2, a, a + 2) for a in (0, 4))),
    ),
    "two dims of features": lambda g, x: g.op("sum.dim_IntList", g.view(x, B, S, 2, 3), [2, 3]),
    "softmax": lambda g, x: g.op("_softmax.default", x, -1, False),
    "cumsum over features": lambda g, x: g.op("cumsum.default", x, 2),
    # Views.
    "flattened": lambda g, x: g.view(x, B * S, H),
    "features split": lambda g, x: g.view(x, B, S, 2, 3),
    "features split, tokens joined": lambda g, x: g.view(x, B * S, 3, 2),
    "flattened and back": lambda g, x: g.op("neg.default", g.view(g.view(x, B * S, H), 1, B, S, H)),
    "unsqueeze": lambda g, x: g.op("unsqueeze.default", x, 2),
    "unsqueeze in front": lambda g, x: g.op("unsqueeze.default", x, 0),
    "expand of features": lambda g, x: g.op("expand.default", g.op("unsqueeze.default", x, 3), [B, S, H, 4]),
    "expand to a new dim in front": lambda g, x: g.op("expand.default", x, [1, B, S, H]),
    "permuted features": lambda g, x: g.op("permute.default", g.view(x, B, S, 2, 3), [0, 1, 3, 2]),
    "a moved dim of size 1": lambda g, x: g.op("permute.default", g.op("unsqueeze.default", x, 0), [1, 0, 2, 3]),
    "transposed features": lambda g, x: g.op("transpose.int", g.view(x, B, S, 2, 3), 2, 3),
    # Pieces of features.
    "slice": lambda g, x: g.op("slice.Tensor", x, 2, 1, 5, 2),
    "select": lambda g, x: g.op("select.int", x, -1, 3),
    "split": lambda g, x: g.call(getitem, g.op("split.Tensor", x, 4, 2), 1),
    "split of sizes": lambda g, x: g.call(getitem, g.op("split_with_sizes.default", x, [1, 5], -1), 1),
    "cat": lambda g, x: g.op("cat.default", [x, g.op("neg.default", x)], -1),
    "cat with another tensor": lambda g, x: g.op("cat.default", [g.same(B, S, 2), x, g.same(B, S, 1)], 2),
    "pad": lambda g, x: g.op("constant_pad_nd.default", x, [1, 2], 0.5),
}

REFUSED: dict[str, tuple[str, Op]] = {
    # Operands with repeated or different tokens.
    "repeated tokens": ("repeats the tokens", lambda g, x: g.op("add.Tensor", x, g.same(3, 1, 1, 1))),
    "expanded tokens": ("repeats the tokens", lambda g, x: g.op("expand.default", x, [3, B, S, H])),
    "other tokens": (
        "with different tokens",
        lambda g, x: g.op("add.Tensor", g.op("unsqueeze.default", g.tokens(B, S), 2), x),
    ),
    # Values that may differ between the ranks, and a write in place.
    "a matmul": ("may differ", lambda g, x: g.op("add.Tensor", x, g.view(g.mm(g.same(14, 4), g.shard(4, H)), B, S, H))),
    "random numbers": ("may differ", lambda g, x: g.op("mul.Tensor", x, g.op("rand.default", [B, S, H]))),
    "random numbers in this shape": ("not computed row by row", lambda g, x: g.op("rand_like.default", x)),
    "dropout": (
        "not computed row by row",
        lambda g, x: g.call(getitem, g.op("native_dropout.default", x, 0.5, True), 0),
    ),
    "in place": ("writes in place", lambda g, x: g.op("relu_.default", x)),
    # Work along the tokens.
    "reduction of a token dim": ("reduces some tokens", lambda g, x: g.op("sum.dim_IntList", x, [1])),
    "mean over tokens": ("reduces over tokens", lambda g, x: g.op("mean.dim", x, [0, 1])),
    "cumsum over tokens": ("works along the tokens", lambda g, x: g.op("cumsum.default", x, 1)),
    "softmax over tokens": ("works along the tokens", lambda g, x: g.op("_softmax.default", x, 1, False)),
    "slice of tokens": ("works along the tokens", lambda g, x: g.op("slice.Tensor", x, 1, 2, 5)),
    "the last token": ("works along the tokens", lambda g, x: g.op("select.int", x, 1, -1)),
    "split of tokens": ("works along the tokens", lambda g, x: g.call(getitem, g.op("split.Tensor", x, 1), 0)),
    "cat of tokens": ("works along the tokens", lambda g, x: g.op("cat.default", [x, x], 1)),
    "cat with different tokens": (
        "concatenates tensors with different tokens",
        lambda g, x: g.op("cat.default", [g.view(x, B * S, H), g.op("select.int", g.tokens(B * S, 3, 2), 2, 0)], 1),
    ),
    # If each rank took its own part of the features, the ranks' rows would hold different features. One rank's graph
    # does not show this, because the ranks' graphs would differ only in the number that says where the part starts. So
    # these ops are refused.
    "one of 3 equal slices": ("the rank's own", lambda g, x: g.op("slice.Tensor", x, 2, 2, 4)),
    "one of 3 equal splits": ("the rank's own", lambda g, x: g.call(getitem, g.op("split.Tensor", x, 2, 2), 1)),
    "one of 3 groups": ("the rank's own", lambda g, x: g.op("select.int", g.view(x, B, S, 3, 2), 2, 1)),
    # Other tokens, tokens in another place, and ops that need all tokens.
    "padded tokens": ("pads tokens", lambda g, x: g.op("constant_pad_nd.default", x, [0, 0, 0, 1])),
    "permuted tokens": ("moves tokens", lambda g, x: g.op("permute.default", x, [1, 0, 2])),
    "tokens behind features": ("moves tokens", lambda g, x: g.op("permute.default", x, [0, 2, 1])),
    "tokens joined with features": ("joins tokens with features", lambda g, x: g.view(x, B, S * H)),
    "flip": ("not computed row by row", lambda g, x: g.op("flip.default", x, [1])),
    "sort": ("not computed row by row", lambda g, x: g.call(getitem, g.op("sort.default", x, 1), 0)),
    "index": ("not computed row by row", lambda g, x: g.op("index.Tensor", x, [g.same(3, dtype=torch.int64)])),
    "matmul": ("not computed row by row", lambda g, x: g.mm(g.view(x, B * S, H), g.shard(H, 5))),
}
NOT_RUN = {"in place", "random numbers", "random numbers in this shape", "dropout", "index"}
"""Cases whose values are not compared: random values, an op in place, or special inputs."""


SUMS: dict[str, tuple[Op, str]] = {
    "sum over tokens": (lambda g, x: g.op("sum.dim_IntList", x, [0, 1]), "sum"),
    "sum over tokens, flattened": (lambda g, x: g.op("sum.dim_IntList", g.view(x, B * S, H), [0], True), "sum"),
    "sum over tokens and some features": (
        lambda g, x: g.op("sum.dim_IntList", g.view(x, B, S, 2, 3), [0, 1, 3], True),
        "sum",
    ),
    "sum over all": (lambda g, x: g.op("sum.default", x), "sum"),
    "sum over the tokens' dim whose size is not 1": (
        lambda g, x: g.op("sum.dim_IntList", g.view(x, 1, B * S, H), [1]),
        "sum",
    ),
    "sum of fp32 in fp64": (
        lambda g, x: g.op("sum.dim_IntList", g.call(convert, x, torch.float32), [0, 1], dtype=F64),
        "sum",
    ),
    "sum of bools": (lambda g, x: g.op("sum.dim_IntList", g.op("gt.Scalar", x, 0.0), [0, 1]), "sum"),
    "amax over all": (lambda g, x: g.op("amax.default", g.op("abs.default", x)), "max"),
    "amax over tokens": (lambda g, x: g.op("amax.default", x, [0, 1], True), "max"),
    "amin over all": (lambda g, x: g.op("amin.default", x, [0, 1, 2]), "min"),
    "max": (lambda g, x: g.op("max.default", x), "max"),
    "min": (lambda g, x: g.op("min.default", x), "min"),
}
"""Reductions over all tokens, and how the ranks' parts are combined."""


def add(made: TokenGraph, op: Op) -> fx.Node:
    """Add ``x`` and the op on it. The graph returns the op's result times 2."""
    x = made.op("add.Tensor", made.tokens(B, S, H), made.same(B, S, H))
    node = op(made, x)
    made.output(made.op("mul.Tensor", node, 2))
    return node


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", HELD)
def test_held(name: str, world_size: int) -> None:
    with fake_group(world_size):
        made = TokenGraph()
        node = add(made, HELD[name])
        finder = made.finder()
        assert node in finder.held, f"not held: {finder.stretches[0].needs_whole}"
        (facts,) = check_rewrite(made)
    assert (facts.status, facts.scatters, facts.gathers, facts.sums) == ("rewritten", 1, 1, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    word, op = REFUSED[name]
    with fake_group(3):
        made = TokenGraph()
        node = add(made, op)
        finder = made.finder()
        assert node not in finder.held
        reasons = [reason for s in finder.stretches for users in s.needs_whole.values() for _, reason in users]
        assert any(word in reason for reason in reasons), reasons
        if name not in NOT_RUN:
            check_rewrite(made)


@pytest.mark.parametrize("name", SUMS)
def test_sum_over_tokens(name: str) -> None:
    """With uneven rows, the last ranks may have rows beyond the last token. A sum leaves them out. A maximum or minimum
    is rewritten only if the tokens divide evenly."""
    op, reduce_op = SUMS[name]
    for world_size in (2, 3):
        with fake_group(world_size):
            made = TokenGraph()
            node = add(made, op)
            finder = made.finder()
            divides = reduce_op == "sum" or world_size == 2
            assert [node] * divides == [n for s in finder.stretches for n in s.sums]
            (facts,) = check_rewrite(made)
            assert (facts.sums, facts.gathers) == ((1, 0) if divides else (0, 1))
            if divides and reduce_op == "sum":
                (combined,) = (n for n in made.graph.nodes if "all_reduce" in str(n.target))
                assert combined.args[1] == reduce_op
            elif divides:
                # An all-reduce would drop a NaN. So an op of ``EXTREMA`` combines the ranks' parts.
                (combined,) = (n for n in made.graph.nodes if n.target in EXTREMA.values() and "wait" in str(n.args[0]))
                assert combined.target is EXTREMA[reduce_op]
            else:
                (reasons,) = finder.stretches[0].needs_whole.values()
                assert "rows beyond the last token" in reasons[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_in_at_most_32_bits_is_added_in_fp32(dtype: torch.dtype) -> None:
    with fake_group(2):
        made = TokenGraph()
        total = made.op("sum.dim_IntList", made.call(convert, made.tokens(B, S, H), dtype), [0, 1])
        made.output(total)
        (facts,) = made.divide()
    nodes = [n for n in made.graph.nodes if n.op == "call_function"]
    (combined,) = (n for n in nodes if "all_reduce" in str(n.target))
    assert facts.sums == 1 and combined.meta["val"].dtype == torch.float32
    (result,) = made.graph.output_node().args[0]
    assert result.meta["val"].dtype == dtype and list(result.meta["val"].shape) == [H]


def test_sums_that_only_results_read_are_combined_in_one_all_reduce() -> None:
    """No op on rows reads these sums. Gradients of norm weights are an example. One all-reduce at the end of the graph
    combines the sums."""
    with fake_group(2):
        made = TokenGraph()
        x = made.op("add.Tensor", made.tokens(B, S, H), made.same(B, S, H))
        sums = [made.op("sum.dim_IntList", made.op(f"{name}.default", x), [0, 1]) for name in ("sin", "cos", "neg")]
        both = made.op("add.Tensor", sums[0], sums[1])
        made.output(made.mm(made.view(x, B * S, H), made.shard(H, 4)), both, made.view(sums[2], 2, 3))
        (facts,) = check_rewrite(made)
        assert (facts.scatters, facts.gathers, facts.sums) == (1, 1, 1)
        order = [str(n.target) for n in made.graph.nodes if n.op == "call_function"]
    assert order.index("aten.mm.default") < order.index("_c10d_functional.all_reduce.default")


def test_a_sum_that_rows_read_is_combined_where_it_stands() -> None:
    """A scale is computed from the largest magnitude in all tokens, and divides each row. So the ranks' largest
    magnitudes must be combined before the division."""
    with fake_group(2):
        made = TokenGraph()
        x = made.op("add.Tensor", made.tokens(B, S, H), made.same(B, S, H))
        scale = made.op("div.Tensor", made.op("amax.default", made.op("abs.default", x)), 448.0)
        quantised = made.op("round.default", made.op("div.Tensor", x, scale))
        made.output(made.mm(made.view(quantised, B * S, H), made.shard(H, 4)))
        (facts,) = check_rewrite(made)
    assert (facts.status, facts.sums, facts.gathers) == ("rewritten", 1, 1)


def test_an_operand_may_have_the_tokens_in_two_ways() -> None:
    """``positions`` is ``[6, H]``. One stretch broadcasts it over the batch. In another stretch, its rows are the
    tokens."""
    with fake_group(2):
        made = TokenGraph()
        positions = made.same(6, H)
        first = made.op("add.Tensor", made.tokens(B, 6, H), positions)
        second = made.op("add.Tensor", made.tokens(6, H), positions)
        made.output(made.op("neg.default", first), made.op("neg.default", second))
        facts = check_rewrite(made)
    assert [f.status for f in facts] == ["rewritten"] * 2


def test_fp8_rows_are_gathered_as_bytes() -> None:
    """Gloo refuses to gather fp8 tensors."""
    with fake_group(2):
        made = TokenGraph()
        x = made.op("add.Tensor", made.tokens(B, S, H), made.same(B, S, H))
        made.output(made.op("flip.default", made.call(convert, x, torch.float8_e4m3fn), [1]))
        (facts,) = check_rewrite(made)
        (gather,) = (n for n in made.graph.nodes if "all_gather" in str(n.target))
    assert facts.status == "rewritten" and gather.meta["val"].dtype == torch.uint8


def test_numbers_that_are_sizes_of_the_tokens_are_the_same_on_all_ranks() -> None:
    """A mean over tokens divides by the number of tokens, which all ranks know. Any other symbolic number may differ
    between ranks."""
    with fake_group(2):
        made = TokenGraph()
        part, other = made.shard(8, H, dynamic=[0]), made.same(8, H, dynamic=[0])
        count, unknown = (made.op("sym_size.int", t, 0) for t in (part, other))
        x = made.op("relu.default", made.reduce(part))
        by_count = made.op("div.Tensor", x, count)
        by_unknown = made.op("div.Tensor", x, unknown)
        finder = made.output(by_count, by_unknown).finder()  # type: ignore[attr-defined]
    assert by_count in finder.held and by_unknown not in finder.held
    (reasons,) = (users for node, users in finder.stretches[0].needs_whole.items() if node is x)
    assert "computes with the number" in reasons[0][1]


def test_two_all_reduces_one_after_the_other_are_both_rewritten() -> None:
    """The second all-reduce sums the result of the first stretch."""
    with fake_group(2):
        made = TokenGraph()
        first = made.op("tanh.default", made.tokens(B, S, H))
        second = made.op("add.Tensor", made.reduce(first), made.same(B, S, H))
        made.output(made.op("neg.default", second))
        check_rewrite(made)
        assert not any("all_reduce" in str(n.target) for n in made.graph.nodes)

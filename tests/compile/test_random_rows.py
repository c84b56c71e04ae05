# SPDX-License-Identifier: Apache-2.0
"""Random programs of all-reduces and other ops. Most of the other ops are token-wise. In more than 90 % of the
programs, a stretch must be rewritten. On every rank, the results must be those of the program as written."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from torch import fx

from tests.support.fake_group import fake_group
from tests.support.hand_graph import getitem
from tests.support.token_graph import TokenGraph
from tests.support.token_graph import check_rewrite

H = 4
SETTINGS = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)


class Program:
    """Draws a graph step by step. ``pool``: tensors ``[*tokens, *features]``, each with its number of token dims."""

    def __init__(self, draw: st.DataObject, world_size: int) -> None:
        self.draw, self.made = draw, TokenGraph()
        self.lead = self.of([[6], [5], [2, 3], [1, 7], [3, 1, 2]])
        self.results: list[fx.Node] = []
        first = self.made.tokens(*self.lead, H)
        self.pool = [(self.made.op("add.Tensor", first, self.made.same(*self.lead, H)), len(self.lead))]
        for _ in range(draw.draw(st.integers(2, 10))):
            getattr(self, self.of(STEPS))()
        self.results += [node for node, _ in self.pool if not node.users]
        self.made.output(*dict.fromkeys(self.results))

    def of(self, choices: list[Any]) -> Any:
        return self.draw.draw(st.sampled_from(choices))

    def tensor(self) -> tuple[fx.Node, int]:
        """A tensor to work on: often the newest one."""
        return self.pool[-1] if self.draw.draw(st.booleans()) else self.of(self.pool)

    def add(self, node: fx.Node, lead: int) -> None:
        self.pool.append((node, lead))

    def one(self) -> None:
        x, lead = self.tensor()
        self.add(self.made.op(f"{self.of(['tanh', 'sigmoid', 'neg', 'relu'])}.default", x), lead)

    def operand(self) -> None:
        """An op with a second operand that is equal on all ranks and broadcasts to the first."""
        x, lead = self.tensor()
        shape = list(x.meta["val"].shape)
        drop = self.draw.draw(st.integers(0, len(shape)))
        shape = [1 if self.draw.draw(st.booleans()) else size for size in shape[drop:]]
        other = self.made.same(*shape)
        pair = (other, x) if self.draw.draw(st.booleans()) else (x, other)
        self.add(self.made.op(f"{self.of(['add', 'mul', 'sub'])}.Tensor", *pair), lead)

    def two(self) -> None:
        x, lead = self.tensor()
        other = self.of([n for n, its in self.pool if its == lead and n.meta["val"].shape == x.meta["val"].shape])
        if self.draw.draw(st.booleans()):
            self.add(self.made.op("where.self", self.made.op("gt.Scalar", x, 0.1), x, other), lead)
        else:
            self.add(self.made.op(self.of(["add.Tensor", "mul.Tensor", "maximum.default"]), x, other), lead)

    def norm(self) -> None:
        x, lead = self.tensor()
        mean = self.made.op("mean.dim", self.made.op("mul.Tensor", x, x), [-1], True)
        scale = self.made.op("rsqrt.default", self.made.op("add.Tensor", mean, 1e-3))
        if len(x.meta["val"].shape) > lead:
            self.add(self.made.op("mul.Tensor", x, scale), lead)

    def reduce(self) -> None:
        """A reduction over some dims: of features, of tokens, or of both."""
        x, lead = self.tensor()
        rank = len(x.meta["val"].shape)
        dims = self.draw.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
        name = self.of(["sum.dim_IntList", "amax.default", "mean.dim"])
        keep = self.draw.draw(st.booleans())
        node = self.made.op(name, x, sorted(dims), keep)
        if min(dims) >= lead:
            self.add(node, lead)
        else:
            self.results.append(node)
            if keep:
                self.add(self.made.op("mul.Tensor", x, node), lead)

    def view(self) -> None:
        x, lead = self.tensor()
        shape = list(x.meta["val"].shape)
        tokens, features = self.of([self.lead, [self.count()]]), shape[lead:]
        if features and features[-1] % 2 == 0 and self.draw.draw(st.booleans()):
            features = [*features[:-1], features[-1] // 2, 2]
        elif len(features) > 1:
            features = [features[0] * features[1], *features[2:]]
        self.add(self.made.view(x, *tokens, *features), len(tokens))

    def permute(self) -> None:
        x, lead = self.tensor()
        rank = len(x.meta["val"].shape)
        features = self.draw.draw(st.permutations(range(lead, rank)))
        self.add(self.made.op("permute.default", x, [*range(lead), *features]), lead)

    def cut(self) -> None:
        """Pieces of a dim of features, joined in another order."""
        x, lead = self.tensor()
        rank = len(x.meta["val"].shape)
        if rank == lead or x.meta["val"].shape[-1] < 2:
            return
        dim = self.of([-1, rank - 1])
        pieces = self.made.op("split.Tensor", x, 1, dim)
        parts = [self.made.call(getitem, pieces, i) for i in (1, 0)]
        self.add(self.made.op("cat.default", [*parts, self.made.op("slice.Tensor", x, dim, 0, 2)], dim), lead)

    def pad(self) -> None:
        x, lead = self.tensor()
        if len(x.meta["val"].shape) > lead:
            self.add(self.made.op("constant_pad_nd.default", x, [self.of([0, 1]), self.of([1, 2])], 0.5), lead)

    def like(self) -> None:
        x, lead = self.tensor()
        self.add(self.made.op("add.Tensor", x, self.made.op("full_like.default", x, 0.25)), lead)

    def mix(self) -> None:
        """An op along the first token dim."""
        x, lead = self.tensor()
        name, *args = self.of([("cumsum.default", 0), ("flip.default", [0]), ("_softmax.default", 0, False)])
        self.add(self.made.op(name, x, *args), lead)

    def layer(self) -> None:
        """Two matmuls, each with a shard of a weight, then an all-reduce, and sometimes a residual."""
        x, lead = self.tensor()
        shape = list(x.meta["val"].shape)
        width = 1
        for size in shape[lead:]:
            width *= size
        flat = self.made.view(x, self.count(), width)
        hidden = self.made.op("tanh.default", self.made.mm(flat, self.made.shard(width, 3)))
        total = self.made.mm(hidden, self.made.shard(3, width))
        reduced = self.made.view(self.made.reduce(total), *shape)
        self.add(self.made.op("add.Tensor", x, reduced) if self.draw.draw(st.booleans()) else reduced, lead)

    def count(self) -> int:
        result = 1
        for size in self.lead:
            result *= size
        return result


STEPS = [
    "one",
    "operand",
    "operand",
    "two",
    "norm",
    "reduce",
    "view",
    "permute",
    "cut",
    "pad",
    "like",
    "mix",
    "layer",
    "layer",
]


@pytest.mark.parametrize(
    ("world_size", "programs"),
    [(3, 30), *(pytest.param(world_size, 60, marks=pytest.mark.thorough) for world_size in (2, 3))],
)
def test_the_rewritten_graph_computes_the_same(world_size: int, programs: int) -> None:
    rewritten = []

    @hypothesis.settings(SETTINGS, max_examples=programs)
    @hypothesis.given(st.data())
    def check(draw: st.DataObject) -> None:
        with fake_group(world_size):
            facts = check_rewrite(Program(draw, world_size).made)
        rewritten.append(any(f.status == "rewritten" for f in facts))

    check()
    assert sum(rewritten) > len(rewritten) * 0.9

# SPDX-License-Identifier: Apache-2.0
"""Graphs of token-wise ops after all-reduces, and a check that the sequence-parallel rewrite keeps their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.passes.sequence.find import RowFinder
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.simulated_ranks import Results
from tests.support.simulated_ranks import run_on_ranks

F64 = torch.float64


class TokenGraph(HandGraph):
    """A hand-made graph that remembers which of its inputs differ between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.own: set[fx.Node] = set()
        """The inputs that differ between the ranks."""
        self._count = 0

    def same(self, *shape: int, dtype: torch.dtype = F64, dynamic: Any = ()) -> fx.Node:
        """An input that is the same on all ranks."""
        self._count += 1
        return self.input(*shape, dtype=dtype, name=f"same_{self._count}", dynamic=dynamic)

    def shard(self, *shape: int, dtype: torch.dtype = F64, dynamic: Any = ()) -> fx.Node:
        """An input that differs between the ranks, as a partial sum or a shard of a weight does."""
        self._count += 1
        node = self.input(*shape, dtype=dtype, name=f"own_{self._count}", dynamic=dynamic)
        self.own.add(node)
        return node

    def tokens(self, *shape: int, dynamic: Any = ()) -> fx.Node:
        """The result of an all-reduce, of shape ``shape``: the last dim holds features, the others are tokens."""
        return self.reduce(self.shard(*shape, dynamic=dynamic))

    def op(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node that calls the operator ``aten.<name>``, for example ``mul.Tensor``."""
        packet, overload = name.split(".")
        return self.call(getattr(getattr(aten, packet), overload), *args, **kwargs)

    def finder(self) -> RowFinder:
        return RowFinder(self.graph).run()

    def values(self, seed: int = 0, sizes: dict[int, int] | None = None) -> list[list[torch.Tensor]]:
        """Random values of the inputs for each rank. ``sizes`` maps the example size of a dynamic dim to its size
        in these values."""
        chance = torch.Generator().manual_seed(seed)
        feeds: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            shape = [(sizes or {}).get(int(s), int(s)) if isinstance(s, torch.SymInt) else s for s in value.shape]
            first = None
            for feed in feeds:
                if first is None or node in self.own:
                    first = torch.randn(shape, dtype=F64, generator=chance).to(value.dtype)
                feed.append(first)
        return feeds


def check_rewrite(made: TokenGraph, seed: int = 0, sizes: dict[int, int] | None = None) -> list[StretchFacts]:
    """Rewrite the graph. Fail if the rewrite fails, or if a result on any rank changes. Returns the facts of the
    stretches."""
    feeds = made.values(seed, sizes)
    expected = run_on_ranks(made.graph, feeds)
    facts = made.divide(schedule="ring")
    assert not any("overlap_inductor_sequence_parallel_failure" in n.meta for n in made.graph.nodes), "rewrite failed"
    compare(run_on_ranks(made.graph, feeds), expected)
    return facts


def compare(found: Results, expected: Results, limit: float = 1e-6) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype, (
                f"result {number} of rank {rank}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
            )
            a, b = a.double(), b.double()
            scale = b.abs().max().clamp(min=1.0) if b.numel() else 1.0
            worst = ((a - b).abs() / scale).max() if b.numel() else 0.0
            assert worst <= limit, f"result {number} of rank {rank} has a relative error of {worst}"

# SPDX-License-Identifier: Apache-2.0
"""``StretchFacts`` describes a stretch, and what the sequence-parallel rewrite did to it."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Size

DIVIDED = "overlap_inductor_divided"
"""Metadata of a graph's output: ``(group name, StretchFacts.program)`` of each rewritten stretch that has a collective
in the graph."""
META = "overlap_inductor_stretch"
"""Metadata of a collective: ``to_dict()`` of its stretch. The partitioner copies it into the forward and backward
graphs, where the overlap pass reads it."""


@dataclass(frozen=True)
class StretchFacts:
    """A stretch of one joint graph or inference graph, the same on every rank.

    Attributes:
        id: equal on every rank and in every run.
        module: path of the module of the first all-reduce.
        ranks: global ranks of the group.
        tokens: number of tokens that are divided among the ranks, an int or an expression.
        features: size of the last dim of the first all-reduce.
        dtype: dtype of the first all-reduce, without ``torch.``.
        all_reduces: number of all-reduces as written.
        scatters: number of reduce-scatters that the rewrite makes, some as an all-to-all and a sum.
        gathers: number of all-gathers of rows that the rewrite makes.
        sums: number of collectives that combine the ranks' parts of a sum, maximum or minimum over tokens.
        gathered_again: number of the forward's all-gathers that the backward repeats.
        nodes: number of nodes that run on rows.
        status: ``rewritten`` | ``kept`` | ``refused``.
        source: ``analytic`` | ``forced``.
        estimate_us: estimated microseconds of matmuls, exposed collectives and token-wise work, as written (``keep``)
            and as ``rewritten``; empty if nothing was estimated.
        reasons: why the stretch is not rewritten.
        program: the first 16 hex digits of a hash of the stretch's operators, and of numbers among their arguments,
            such as an epsilon. Ranks compare it.
        gathered_for: for each kind of op that needs all tokens, how often such an op reads a tensor that is divided
            among the ranks: ``{"aten.mm.default": 5}``.
    """

    id: str
    module: str
    ranks: tuple[int, ...]
    tokens: Size
    features: Size
    dtype: str
    all_reduces: int
    scatters: int
    gathers: int
    sums: int
    gathered_again: int
    nodes: int
    status: str
    source: str
    estimate_us: dict[str, float] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    gathered_for: dict[str, int] = field(default_factory=dict)
    program: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks), "reasons": [asdict(r) for r in self.reasons]}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> StretchFacts:
        reasons = tuple(Reason(**r) for r in value["reasons"])
        return cls(**{**value, "ranks": tuple(value["ranks"]), "reasons": reasons})

# SPDX-License-Identifier: Apache-2.0
"""``StretchFacts`` describes a stretch, and what the sequence-parallel rewrite did to it.

A stretch has all-reduces and the token-wise work after them. The rewrite turns the all-reduces into reduce-scatters,
runs the work on each rank's rows, and writes gathers in front of ops that need all rows. Plain data.
"""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Size

DIVIDED = "overlap_inductor_divided"
"""Metadata of a graph's output: ``(group, program)`` of each rewritten stretch that has a collective in the graph."""
META = "overlap_inductor_stretch"
"""Metadata of a collective's node: the ``to_dict`` of the stretch that it belongs to. The partitioner copies this
metadata from the joint graph into the forward and the backward graph. There the overlap pass reads it for its
report."""


@dataclass(frozen=True)
class StretchFacts:
    """A stretch of one joint graph or inference graph, the same on every rank.

    Attributes:
        id: the same on every rank and in every run. If the stretch is rewritten, a site at one of the stretch's
            collectives names the stretch as ``derived_from``.
        module: path of the module of the first all-reduce.
        ranks: global ranks of the group.
        tokens: number of tokens that are divided among the ranks, an int or an expression.
        features: size of the last dim of the first all-reduce.
        dtype: dtype of the first all-reduce, without ``torch.``.
        all_reduces: number of all-reduces as written.
        scatters, gathers, sums: how many collectives of each kind the rewrite makes. ``scatters`` are reduce-scatters.
            The rewrite writes some of them as an all-to-all and a sum. ``gathers`` are all-gathers of rows. ``sums``
            are collectives that combine the ranks' parts of a sum, maximum or minimum over tokens.
        gathered_again: number of the forward's all-gathers that the backward repeats. The forward saves a rank's own
            rows for the backward, not the gathered tensors.
        nodes: number of nodes that run on rows.
        status: ``rewritten`` | ``kept`` | ``refused``.
        source: ``analytic`` | ``forced``.
        estimate_us: estimated microseconds as written (``keep``) and as ``rewritten``. Each is the sum of the matmuls
            beside the collectives, the exposed parts of the collectives, and the token-wise work. Empty if the times
            were not estimated.
        reasons: why the stretch is not rewritten.
        program: the first 16 hex digits of a hash of the nodes that run on rows or reduce over tokens, and of the nodes
            that compute their inputs. The hash covers each node's operator and the numbers among its arguments, such as
            an epsilon. Ranks compare the hash, because these numbers may differ between ranks.
        gathered_for: for each op that needs all rows, how often a node of this op reads a tensor that is held as rows:
            ``{"aten.mm.default": 5}``. Several such reads may share one gather.
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

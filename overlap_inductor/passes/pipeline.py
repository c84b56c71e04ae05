# SPDX-License-Identifier: Apache-2.0
"""The pipeline: our passes, and the slot in which each of them runs. A *slot* is a setting of Inductor that holds
custom passes.

::

    slot       runs on
    JOINT      the joint graph, before the partitioner chooses what is saved for backward; also inference graphs
               pass "permutations": notes, for the backward graph, which index tensors hold each index once
               pass "sequence_parallel": all-reduces become reduce-scatters, work behind them runs on a rank's rows
               pass "host_guard": adds guards, so that a graph for few dynamic tokens may stay as written
    POST_GRAD  forward, backward and inference graphs, each on its own
               pass "overlap": collectives and the matmuls beside them become overlap ops

If a slot has no pass, the functions ``enable`` and ``overlap`` install nothing in the slot. If a pass is added to such
a slot later, compiles with these switches run it only after the next call of one of these functions. A compile with
``backend="overlap_inductor"`` runs all passes that the pipeline has at that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport

POST_GRAD, JOINT = "post_grad", "joint"
SLOTS = (POST_GRAD, JOINT)


@dataclass(frozen=True)
class GraphContext:
    """What a pass gets besides the graph.

    Attributes:
        is_inference: whether the graph is compiled for inference; ``None`` if Inductor does not say
            (only for joint graphs).
        graph_id: Dynamo's name of the graph, the same on all ranks.
        refusal: why nothing may be overlapped in the graph, or ``None``.
    """

    config: OverlapConfig
    is_inference: bool | None
    graph_id: str
    refusal: str | None


class GraphPass(Protocol):
    """A pass over one FX graph. It does not communicate, but must make the same decisions on all ranks. ``name`` and
    ``version`` enter Inductor's cache keys, unless ``version`` is empty."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def run(self, graph: fx.Graph, context: GraphContext) -> OverlapReport | None:
        """Rewrite ``graph`` in place. Returns a report, or ``None`` if there is nothing to report.

        An exception from ``run`` fails the compile. So if the rewrite of a pass is optional and fails, ``run`` restores
        the graph and raises nothing.
        """
        ...


class Overlap:
    """Runs ``passes.overlap_pass``. ``version`` is empty: the cache keys already cover the package's sources."""

    name, version = "overlap", ""

    def run(self, graph: fx.Graph, context: GraphContext) -> OverlapReport:
        from overlap_inductor.passes import overlap_pass

        return overlap_pass.run_overlap_pass(
            graph,
            context.config,
            is_inference=bool(context.is_inference),
            graph_id=context.graph_id,
            refusal=context.refusal,
        )


class SequenceParallel:
    """Runs ``passes.sequence_parallel``. The overlap pass reports this rewrite later."""

    name, version = "sequence_parallel", ""

    def run(self, graph: fx.Graph, context: GraphContext) -> None:
        from overlap_inductor.passes import sequence_parallel

        sequence_parallel.run_sequence_parallel(graph, context.config, context.refusal)


class HostGuard:
    """Runs ``passes.host_guard``."""

    name, version = "host_guard", ""

    def run(self, graph: fx.Graph, context: GraphContext) -> None:
        from overlap_inductor.passes import host_guard

        host_guard.guard_counts(graph, context.config, context.refusal)


class Permutations:
    """Runs ``sites.permutations`` and ``sites.sorted_parts``: notes which index tensors hold each index once, and which
    rows arrive sorted."""

    name, version = "permutations", ""

    def run(self, graph: fx.Graph, context: GraphContext) -> None:
        from overlap_inductor.sites import permutations
        from overlap_inductor.sites import sorted_parts

        permutations.note(graph)
        sorted_parts.note(graph)


PIPELINE: list[tuple[str, GraphPass]] = [
    (JOINT, Permutations()),
    (JOINT, SequenceParallel()),
    (JOINT, HostGuard()),
    (POST_GRAD, Overlap()),
]


def passes_in(slot: str) -> list[GraphPass]:
    """The passes of a slot, in order."""
    return [one for where, one in PIPELINE if where == slot]

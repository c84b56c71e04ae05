# SPDX-License-Identifier: Apache-2.0
"""The pipeline lists which pass runs in which slot of ``torch.compile``, in order.

::

    joint graph        JOINT      before the partitioner chooses what is saved for backward; inference graphs, too
    post-grad graphs   POST_GRAD  forward, backward and inference graphs, one at a time
                                  overlap: matmuls beside collectives become overlap ops

A slot without a pass changes neither Inductor's setting nor its cache keys. A pass that is added while the switches are
on takes effect when they are set the next time.
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
        is_inference: ``None`` where Inductor does not say (joint graphs).
        graph_id: Dynamo's name of the graph, the same on all ranks.
        refusal: why nothing may be overlapped in the graph, or ``None``.
    """

    config: OverlapConfig
    is_inference: bool | None
    graph_id: str
    refusal: str | None


class GraphPass(Protocol):
    """A pass over one FX graph. It changes the graph in place, does not communicate, and decides alike on all ranks.

    Attributes:
        name: how messages call the pass.
        version: part of Inductor's cache keys, because two versions may write different graphs.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def run(self, graph: fx.Graph, context: GraphContext) -> OverlapReport | None:
        """Run on ``graph`` and report. An exception fails the compile. A pass that can do without its rewrite restores
        the graph and returns."""
        ...


class Overlap:
    """Runs ``passes.overlap_pass``. ``version`` is empty: the cache key holds the package's sources already."""

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


PIPELINE: list[tuple[str, GraphPass]] = [(POST_GRAD, Overlap())]


def passes_in(slot: str) -> list[GraphPass]:
    """The passes of a slot, in order."""
    return [one for where, one in PIPELINE if where == slot]

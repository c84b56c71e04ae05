"""The pipeline: which pass runs in which slot of ``torch.compile``, in order.

::

    joint graph        JOINT      before the partitioner chooses what is saved for backward; inference graphs, too
    post-grad graphs   POST_GRAD  forward, backward and inference graphs, each for itself
                                  overlap: matmuls beside collectives become overlap ops

A slot without a pass is left alone: Inductor's setting and its cache keys stay as they are. A pass that is added while
the switches are on takes effect when they are set the next time.
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
    """What a pass is told beside the graph.

    Attributes:
        is_inference: ``None`` where Inductor does not say (joint graphs).
        graph_id: Dynamo's name of the graph, alike on all ranks.
        refusal: why nothing may be overlapped in the graph, if anything speaks against it.
    """

    config: OverlapConfig
    is_inference: bool | None
    graph_id: str
    refusal: str | None


class GraphPass(Protocol):
    """A pass over one FX graph. It changes the graph in place, communicates nothing, and writes one text on all ranks.

    Attributes:
        name: in messages.
        version: part of Inductor's cache keys: two versions may write different graphs.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def run(self, graph: fx.Graph, context: GraphContext) -> OverlapReport | None:
        """Run on ``graph``, and report. What it raises fails the compile: a pass that can go on without its rewrite
        restores the graph and does."""
        ...


class Overlap:
    """``passes.overlap_pass``. Its version is that of the package's sources, which are in the cache key already."""

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

# SPDX-License-Identifier: Apache-2.0
"""Rewrite a graph or restore it: a failed rewrite leaves no trace in the graph."""

from __future__ import annotations

import copy
import logging

from torch import fx

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.passes.rewrite import Rewriter
from overlap_inductor.passes.sequence.seams.chains import Chain
from overlap_inductor.passes.sequence.seams.join import ids
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.failure import Failure
from overlap_inductor.sites.nodes import DecidedSite

log = logging.getLogger("overlap_inductor")

JOINED = ("seam", "chain")
"""The stages of failures after which all sites are still overlapped (``Failure``)."""


def rewrite_or_restore(
    snapshot: Snapshot, chosen: list[DecidedSite], rewriter: Rewriter
) -> tuple[ExchangePlan, list[str]] | Failure:
    """Rewrite ``chosen``; if that fails, restore the graph from ``snapshot``.

    Returns:
        ``(what the ranks compare before data moves, names of the plan's groups)`` from ``Rewriter.apply``, or the
        failure. The failure names the sites of a seam (stage ``seam``) or of a chain (stage ``chain``), one site, or
        all sites. It names all sites if no single site was being rewritten.
    """
    try:
        return rewriter.apply(chosen)
    except Exception as error:  # noqa: BLE001  (the model must compile in any case; the report names the error)
        snapshot.restore()
        if (joined := rewriter.joining) is not None:
            failure = Failure.of(error, "chain" if isinstance(joined, Chain) else "seam", ids(joined))
            log.warning("overlap_inductor: %s. %s", not_joined(failure), BUG_REPORT, exc_info=True)
            return failure
        blamed = [rewriter.current] if rewriter.current is not None else chosen
        names = " or ".join(site.facts.id for site in blamed)
        log.warning(
            "overlap_inductor: could not rewrite site %s (%s); the graph was restored and the site runs as written. %s",
            names,
            error,
            BUG_REPORT,
            exc_info=True,
        )
        return Failure.of(error, "rewrite", [site.facts.id for site in blamed])


def not_joined(failure: Failure) -> str:
    """What a failure of stage ``seam`` or ``chain`` means for its sites."""
    wanted, instead = ("in bands", "without bands") if failure.stage == "seam" else ("as a chain", "as two seams")
    return f"could not write the sites {' and '.join(failure.sites)} {wanted} ({failure.error}); they run {instead}"


class Snapshot:
    """A copy of a graph, from which the graph can be restored."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.copy = graph, fx.Graph()
        copy_into(graph, self.copy)

    def restore(self) -> None:
        """Give the graph new nodes with the old names and metadata."""
        # ``erase_node`` needs a node without users, and the half rewritten graph may be out of order. So first remove
        # every edge. A node inserted before an erased node is not in ``graph.nodes``, but may use a node there. So the
        # set below holds the nodes of ``graph.nodes``, and all nodes that use one of them.
        for node in {*self.graph.nodes, *(user for n in self.graph.nodes for user in n.users)}:
            node.args, node.kwargs = (), {}
        for node in list(self.graph.nodes):
            self.graph.erase_node(node)
        copy_into(self.copy, self.graph)


def copy_into(source: fx.Graph, target: fx.Graph) -> None:
    """Copy all nodes of ``source``, with names and metadata, to the empty graph ``target``."""
    mapping: dict[fx.Node, fx.Node] = {}
    result = target.graph_copy(source, mapping)
    output = target.output(result)
    output.meta = copy.copy(next(n for n in reversed(source.nodes) if n.op == "output").meta)
    for node, twin in mapping.items():
        twin.meta = copy.copy(node.meta)
        # A restored graph still treats the names of its erased nodes as taken, so a copy would get another name.
        twin.name = node.name

# SPDX-License-Identifier: Apache-2.0
"""Whether a seam may be written in bands. Ranks with equal graphs and settings give the same answer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from overlap_inductor.lowerings.ring import gather_cuts
from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import held_rows
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.collectives import kept_kind
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.torch_compat import operators


def bands_of(seam: Seam, counts: Sequence[int]) -> list[int]:
    """The numbers among ``counts`` that may be the seam's number of bands."""
    plans = [s.decision.moving for s in (seam.scatter, seam.gather)]
    if any(p.schedule != "ring" or not p.parameters.get("unrolled") or "min_rows" in p.parameters for p in plans):
        return []
    rows = tools.shape(seam.scattered)[0]
    found = [n for n in counts if n > 1 and isinstance(rows, int) and rows % n == 0]
    legal = (
        bool(found)
        and plans[0].parameters["route"] == "owner"
        and plans[0].transport == plans[1].transport
        and _scatters_rows(seam, rows)
        and _gathers_rows(seam, rows)
        and _joinable(seam)
        and _independent(seam)
        and _may_move(seam)
    )
    return [n for n in found if _row_wise(seam, n)] if legal else []


def _scatters_rows(seam: Seam, rows: int) -> bool:
    """Whether the scatter gives each rank ``rows`` consecutive rows of the results of ungrouped matmuls."""
    nodes = seam.scatter.nodes
    if not isinstance(nodes, ReduceNodes) or nodes.region is not None or len(nodes.collectives) > 1:
        return False
    sharded, target = nodes.sharded, nodes.layouts[nodes.computed[0]].without_rank()
    return (
        (sharded.dim, sharded.outer, sharded.chunk, sharded.short) == (0, 1, rows, False)
        and nodes.padding is None
        and not any(isinstance(m, GroupedMatmul) for m in nodes.leaves)
        and nodes.leaf_layout.without_rank().same_elements(target)
        and tools.shape(nodes.collectives[0].node) == [rows, *nodes.shape[1:]]
    )


def _gathers_rows(seam: Seam, rows: int) -> bool:
    """Whether each rank gives ``rows`` rows to the gather, and the gather's matmuls may read them in bands."""
    nodes = seam.gather.nodes
    if not isinstance(nodes, GatherNodes):
        return False
    lead = gather_cuts.leading_atom(nodes)
    if lead is None or lead.size != rows or nodes.shard_shape[0] != rows or not gather_cuts.can_cut(nodes):
        return False
    axes = [gather_cuts.axis_of(c, lead) for c in nodes.consumers]
    return all(axis is not None and axis[0] == "chunk" for axis in axes) and not any(
        c.sharded.short for c in nodes.consumers
    )


def _row_wise(seam: Seam, bands: int) -> bool:
    """Whether each band of the gathered rows is computed from the same band of the scattered rows."""
    try:
        held = held_rows(seam.scattered, seam.region, seam.scatter.facts.collective.group_name, bands)
    except NotRowWise:
        return False
    # A ``cat`` of bands is contiguous, so a tensor whose bands are joined must be contiguous. Other tensors of the
    # region, for example an ``expand``, need not be.
    joined = [n for n in (*seam.joined, seam.gathered) if tools.is_tensor(n)]
    return held[seam.gathered].lead == 1 and all(tools.value(n).is_contiguous() for n in joined)


def _joinable(seam: Seam) -> bool:
    """Whether each node whose bands are joined is one tensor without unbacked sizes."""
    return all(tools.is_tensor(n) and not tools.has_unbacked(tools.shape(n)) for n in seam.joined)


def _independent(seam: Seam) -> bool:
    """Whether the gather's matmuls depend on the scattered rows only through the gathered tensor."""
    nodes, known = seam.gather.nodes, dict[fx.Node, bool]()
    known[seam.gather.collectives[0].node] = False
    inside = {*nodes.others(), *(m.node for m in nodes.matmuls)}
    read = {i for n in inside for i in n.all_input_nodes}
    return not any(tools.depends_on(n, seam.scattered, known) for n in read)


def _may_move(seam: Seam) -> bool:
    """Whether no node between the two collectives is a collective or writes in place."""
    node = seam.scattered.next
    while node is not seam.gather.collectives[0].node:
        if kept_kind(node) is not None or operators.is_mutable(node):
            return False
        node = node.next
    return True

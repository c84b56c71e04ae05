# SPDX-License-Identifier: Apache-2.0
"""Find the chains of a graph: two seams, where the second seam multiplies the rows that the first seam's gather has
multiplied::

    n = norm(reduce_scatter(o_proj(a)))                         # the first seam
    h = silu(gate(all_gather(n))) * up(all_gather(n))
    m = norm(reduce_scatter(down(h)));  q = q_proj(all_gather(m))   # the second seam

Both seams are written in the same number of bands. Then a band of ``h`` is multiplied by ``down`` and sent before the
next band of ``h`` is computed (``write_chain``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from overlap_inductor.lowerings.ring.unrolled_bands import gather_groups
from overlap_inductor.lowerings.ring.unrolled_bands import scatter_groups
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.placement import movable
from overlap_inductor.sites.placement import needed_behind
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.torch_compat import operators


@dataclass(frozen=True)
class Chain:
    """``second`` multiplies rows that the gather of ``first`` has multiplied."""

    first: Seam
    second: Seam


def find(seams: Iterable[Seam]) -> list[Chain]:
    """The chains among ``seams``. A seam is in one chain at most."""
    found: list[Chain] = []
    left = list(seams)
    for second in list(left):
        if not any(s is second for s in left):
            continue
        first = next((s for s in left if s is not second and _feeds(s, second) and _may_move(s, second)), None)
        if first is not None:
            found.append(Chain(first, second))
            left = [s for s in left if s is not first and s is not second]
    return found


def groups_agree(chain: Chain, bands: int) -> bool:
    """Whether one matmul of the first gather multiplies the rows of the same ranks as one matmul of the second scatter,
    if both are cut into ``bands``."""
    gather, scatter = nodes_of(chain.first.gather, GatherNodes), nodes_of(chain.second.scatter, ReduceNodes)
    world_size, rows = chain.first.gather.facts.collective.world_size, scatter.sharded.chunk // bands
    return gather_groups(gather, world_size, rows) == scatter_groups(scatter, world_size, rows)


def _feeds(first: Seam, second: Seam) -> bool:
    """Whether all left operands of the second scatter's matmuls are results of the first gather, row by row, and each
    rank has equally many rows in both. The second gather must not sum over the gathered rows, because its sum has one
    order of bands."""
    gather, scatter, later = first.gather.nodes, second.scatter.nodes, second.gather.nodes
    if first.gather.facts.collective.group_name != second.scatter.facts.collective.group_name:
        return False
    if not (isinstance(gather, GatherNodes) and isinstance(scatter, ReduceNodes) and isinstance(later, GatherNodes)):
        return False
    by_rows = [c for c in gather.consumers if (c.role, c.operand) == ("M", "lhs")]
    if scatter.role != "M" or not all(same_size(c.sharded.chunk, scatter.sharded.chunk) for c in by_rows):
        return False
    results = {*gather.epilogue.outputs, *(c.matmul.node for c in by_rows)}
    return all(_computed(m.lhs, results) for m in scatter.leaves) and all(c.role != "K" for c in later.consumers)


def _computed(operand: fx.Node, results: set[fx.Node]) -> bool:
    """Whether ``operand`` is one of ``results``, or a view of it with the same features."""
    node = operand
    while node not in results and tools.is_reshape(node):
        node = node.args[0]
    return node in results and same_size(tools.shape(node)[-1], tools.shape(operand)[-1])


def _may_move(first: Seam, second: Seam) -> bool:
    """Whether all that the second seam reads, besides the first gather's results, may be computed before the first
    gather. Nothing of it may need a collective (so not the first gather either), a write or a random op."""
    scatter, gather = nodes_of(second.scatter, ReduceNodes), nodes_of(second.gather, GatherNodes)
    read = {*scatter.externals, *(m.rhs for m in scatter.leaves)}
    read.update(n for m in scatter.leaves for n in (scatter.bias_of(m), *m.scales()) if n is not None)
    pointwise = [n for n in scatter.layouts if tools.is_pointwise(n)]
    read.update(i for n in pointwise for i in n.all_input_nodes if not tools.is_tensor(i))
    region, computed = {second.scattered, *second.region}, {*gather.others(), *(m.node for m in gather.matmuls)}
    read.update(i for n in second.region for i in n.all_input_nodes if i not in region)
    known = dict.fromkeys(second.gather.collectives[0].chain(), True)
    read.update(i for n in computed for i in n.all_input_nodes if not tools.depends_on(i, second.scattered, known))
    return all(free_to_move(n) for n in needed_behind(list(read), first.gather.collectives[0].node))


def free_to_move(node: fx.Node) -> bool:
    """Whether ``node`` has no effect besides its result, is no collective and draws no random numbers."""
    return movable(node) and not operators.has_tag(node, torch.Tag.nondeterministic_seeded)

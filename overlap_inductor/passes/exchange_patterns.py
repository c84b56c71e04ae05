# SPDX-License-Identifier: Apache-2.0
"""Find the sites of matmuls and all-to-alls: experts' dispatch and combine, and Ulysses attention.

::

    wait_tensor(all_to_all_single(f(mm(x, w))))      matmul_all_to_all      f: views, permutes, ops of one token (norms)
    mm(f(wait_tensor(all_to_all_single(x))), w)      all_to_all_matmul
    all_to_all_single(f(wait_tensor(all_to_all_single(x))))    all_to_all_experts    f: grouped matmuls of the rows

Ranks may send each other parts of different sizes (``sites.uneven_nodes``).
"""

from __future__ import annotations

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes import examples
from overlap_inductor.passes.find_banded import find_banded
from overlap_inductor.passes.find_dispatched import find_dispatched
from overlap_inductor.passes.find_received import find_received
from overlap_inductor.passes.find_reduce import find_reduce
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites.all_to_all import refusal
from overlap_inductor.sites.nodes import CollectiveNode


class AllToAllExperts:
    """Pattern ``all-to-all -> experts -> all-to-all`` (see ``Pattern``). It is tried before ``MatmulAllToAll`` and
    ``AllToAllMatmul``, so that both exchanges become one site."""

    name = "all_to_all_experts"
    kind = "all_to_all"
    early = False
    example = None

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        alike = {n: c for n, _, c in search.collectives.values() if isinstance(c, CollectiveNode)}
        nodes, reason = find_dispatched(collective, alike)
        if nodes is None:
            return Miss([] if reason is None else [reason])
        combine = nodes.combine.node
        if combine in search.taken():
            text = f"{combine.name}, which returns the experts' rows, belongs to another site"
            return Miss([Reason("shares_nodes", text)])
        search.merged.add(combine)
        return Match(nodes, 0, "M")


class MatmulAllToAll:
    """Pattern ``matmul -> all-to-all`` (see ``Pattern``). It is tried before ``AllToAllMatmul``. So if an
    exchange stands between a projection and attention written as matmuls, the projection hides the exchange."""

    name = "matmul_all_to_all"
    kind = "all_to_all"
    early = False
    example = examples.MATMUL_ALL_TO_ALL

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        if (reason := refusal(collective)) is not None:
            return Miss([reason], final=True)
        nodes, obstacle, left = find_reduce([collective], collective.wait, search.owned())
        if nodes is None and obstacle is not None and obstacle.code in ("layout", "op_between"):
            banded = find_banded(collective, search.owned())
            if banded is not None:
                return Match(banded, banded.sharded.dim, banded.role)
        if nodes is None or (obstacle is not None and find_received(collective)[0] is not None):
            return Miss([] if obstacle is None else [obstacle], left=left)
        return Match(nodes, nodes.sharded.dim, nodes.role, obstacle, left)


class AllToAllMatmul:
    """Pattern ``all-to-all -> matmul`` (see ``Pattern``)."""

    name = "all_to_all_matmul"
    kind = "all_to_all"
    early = False
    example = examples.ALL_TO_ALL_MATMUL

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        nodes, obstacles = find_received(collective)
        if nodes is None:
            return Miss(obstacles)
        return Match(nodes, nodes.given.rank_dim(), nodes.consumers[0].role)

# SPDX-License-Identifier: Apache-2.0
"""Find the seams of a graph: a site ``matmul -> reduce-scatter``, token-wise work on its rows, and a site ``all-gather
-> matmul`` that gathers the result::

    r = reduce_scatter(o_proj(a)) + x;  n = norm(r);  y = up(all_gather(n))
        scatter                         region        gather
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import DecidedSite


@dataclass(frozen=True)
class Seam:
    """Two sites of one group and the nodes between them.

    Attributes:
        scatter: the reduce-scatter with its matmuls.
        gather: the all-gather with its matmuls.
        region: the nodes on the way from the scattered rows to the gathered rows, in graph order.
    """

    scatter: DecidedSite
    gather: DecidedSite
    region: tuple[fx.Node, ...]

    @property
    def scattered(self) -> fx.Node:
        return self.scatter.collectives[0].wait

    @property
    def gathered(self) -> fx.Node:
        """The rows that this rank gives to the gather."""
        return self.gather.collectives[0].input

    @property
    def joined(self) -> list[fx.Node]:
        """The nodes of ``region`` that have a reader outside ``region``, other than the gather. Their bands are joined
        for this reader."""
        known = {*self.region, *self.gather.collectives[0].chain()}
        return [n for n in self.region if not known.issuperset(n.users)]


def find(sites: Iterable[DecidedSite]) -> list[Seam]:
    """The seams among ``sites``. A gather goes with the last scatter on which its rows depend. Of several gathers that
    go with one scatter, the first is taken."""
    found: dict[str, Seam] = {}
    ordered = sorted(sites, key=lambda s: s.collectives[0].node)
    scatters = [s for s in ordered if s.facts.pattern == "matmul_reduce_scatter"]
    for gather in ordered:
        if gather.facts.pattern != "all_gather_matmul":
            continue
        rows = gather.collectives[0].input
        before = [s for s in scatters if s.facts.collective.group_name == gather.facts.collective.group_name]
        for scatter in reversed([s for s in before if not rows < s.collectives[0].wait]):
            if (region := between(scatter.collectives[0].wait, rows)) is not None:
                found.setdefault(scatter.facts.id, Seam(scatter, gather, tuple(region)))
                break
    return list(found.values())


def between(first: fx.Node, last: fx.Node) -> list[fx.Node] | None:
    """The nodes on the way from ``first`` to ``last`` in graph order, without ``first``. ``None`` if ``last`` does not
    depend on ``first``."""
    known: dict[fx.Node, bool] = {}
    if not tools.depends_on(last, first, known):
        return None
    found: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if node is first or node in found or not tools.depends_on(node, first, known):
            continue
        found.add(node)
        pending += node.all_input_nodes
    return sorted(found)


def held_rows(scattered: fx.Node, region: Iterable[fx.Node], group_name: str, bands: int) -> dict[fx.Node, Rows]:
    """``{node: Rows}`` for ``scattered`` and the nodes of ``region``, if the rows are divided into ``bands``. ``Rows``
    says which leading dims of a node are the tokens. Raises ``NotRowWise`` if an op cannot be computed on one band."""
    held = {scattered: Rows(Tokens(group_name, bands, tools.shape(scattered)[0]), 1)}
    for node in region:
        rule = rule_of(node)
        if rule is None:
            raise NotRowWise(f"{node.target} is not computed row by row")
        held[node] = rule.held(node, held)
    return held

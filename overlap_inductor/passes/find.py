# SPDX-License-Identifier: Apache-2.0
"""Find every site of a graph, and give a reason for every collective that is part of no site.

At each collective, the finder asks, in their order, those ``passes.patterns`` whose ``kind`` is the collective's kind.
The graph does not change::

    for each collective in graph order:
        for each pattern of its kind: Match -> a site; Miss -> its reasons
        no site -> a near miss with the patterns' first reason, or else with the reason from ``sites.beside``
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.facts.stretch import META
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Pattern
from overlap_inductor.passes.patterns import PATTERNS
from overlap_inductor.report.report import NearMiss
from overlap_inductor.sites import beside
from overlap_inductor.sites import collectives as finding
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import naming
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import OverlapSite


class SiteFinder:
    """One walk over a graph's collectives. Patterns read it through ``pattern.Search``.

    Attributes:
        phase: inference, forward or backward.
        idle: names of collectives whose sites were not overlapped after an earlier walk. So these sites own no matmuls,
            and other sites may take them.
        left: matmuls that a pattern did not take, because another site owns them (``Match.left``, ``Miss.left``).
        merged: further collectives of sites with several collectives; ``run`` skips them.
        sites, near_misses: what ``run`` found, in graph order.
    """

    def __init__(self, graph: fx.Graph, phase: str, idle: Collection[str] = ()) -> None:
        self.graph, self.phase, self.idle = graph, phase, idle
        self.left: set[fx.Node] = set()
        self.merged: set[fx.Node] = set()
        self.sites: list[OverlapSite] = []
        self.near_misses: list[NearMiss] = []

    @functools.cached_property
    def collectives(self) -> dict[fx.Node, tuple[fx.Node, str, CollectiveNode | Reason]]:
        return {found[0]: found for found in finding.find_collectives(self.graph)}

    @functools.cached_property
    def _ordinals(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.collectives)}

    @functools.cached_property
    def _early(self) -> dict[tuple[str, fx.Node], Match | Miss]:
        """What each early pattern finds at each collective of its kind. The sites of early patterns (``Pattern.early``)
        are found before all other sites."""
        return {
            (pattern.name, node): pattern.find(found, self)
            for pattern in PATTERNS
            if pattern.early
            for node, kind, found in self.collectives.values()
            if kind == pattern.kind and isinstance(found, CollectiveNode)
        }

    def owned(self) -> set[fx.Node]:
        """The matmuls of the sites found so far and of all early sites, without those of ``idle``. All-reduces
        whose results are added are one site, which is found at the first of them. Such a site also looks for its
        matmuls further down in the graph. Another site there, an early one that ``run`` has not reached, may own such a
        matmul. So all early sites count."""
        early = [(node, m.nodes) for (_, node), m in self._early.items() if isinstance(m, Match)]
        found = [(s.collectives[0].node, s.nodes) for s in self.sites]
        return {m.node for node, nodes in early + found if node.name not in self.idle for m in nodes.matmuls}

    def taken(self) -> set[fx.Node]:
        """The collectives of the sites found so far and of all early sites."""
        early = [m.nodes for m in self._early.values() if isinstance(m, Match)]
        return {c.node for nodes in [*early, *(s.nodes for s in self.sites)] for c in nodes.collectives}

    def run(self) -> SiteFinder:
        for node, kind, found in self.collectives.values():
            if isinstance(found, Reason):
                self._miss(node, kind, found)
            elif node not in self.merged:
                self._classify(found)
        return self

    def _classify(self, collective: CollectiveNode) -> None:
        patterns = [p for p in PATTERNS if p.kind == collective.kind]
        if not patterns:
            text = f"this version does not overlap {collective.kind.replace('_', '-')} collectives"
            self._miss(collective.node, collective.kind, Reason("pattern_not_available", text))
            return
        reasons: list[Reason] = []
        anchor = None
        for pattern in patterns:
            found = self._early.get((pattern.name, collective.node)) or pattern.find(collective, self)
            self.left.update(found.left)
            if isinstance(found, Match):
                self._add(pattern, collective, found)
                return
            reasons += found.reasons
            if found.final:
                anchor = found.anchor
                break
        self._miss(collective.node, collective.kind, reasons[0] if reasons else beside.reason(collective), anchor)

    def _add(self, pattern: Pattern, collective: CollectiveNode, found: Match) -> None:
        nodes = found.nodes
        matmuls = [m.describe(role) for m, role in zip(nodes.matmuls, nodes.roles, strict=True)]
        anchor = nodes.matmuls[0].node
        facts = finding.describe(collective.node, collective.kind, found.dim, found.role)
        module = naming.module_of(anchor) or naming.module_of(collective.node)
        # The id must be the same on all ranks. Node names may differ, and so may a matmul's sizes, bias and padding. So
        # the id is made of the pattern, the module, the phase, what the collective moves, and the collective's index in
        # the graph's collectives.
        ordinal = self._ordinals[collective.node]
        moves = f"{facts.reduce_op}:{facts.dtype}:{tools.size_text(tools.shape(collective.input)[-1])}"
        identity = naming.site_id(pattern.name, module, self.phase, ordinal, moves)
        stretch = collective.node.meta.get(META, {})
        derived_from = stretch["id"] if stretch.get("status") == "rewritten" else None
        described = SiteFacts(identity, pattern.name, module or anchor.name, facts, tuple(matmuls), derived_from)
        self.sites.append(OverlapSite(described, nodes, found.obstacle))

    def _miss(self, node: fx.Node, kind: str, reason: Reason, anchor: fx.Node | None = None) -> None:
        module = naming.module_of(anchor or node)
        self.near_misses.append(NearMiss(finding.describe(node, kind), reason, module))

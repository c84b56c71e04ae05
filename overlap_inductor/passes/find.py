"""Find every site of a graph, and give a reason for every collective that is no site.

::

    all_gather(x) -> mm(wait, w)           site all_gather_matmul
    mm(x, w) -> reduce_scatter             site matmul_reduce_scatter
    mm(x, w) -> all_reduce                 site matmul_all_reduce
    mm(x, w) -> all_gather                 site matmul_all_gather
    all_reduce(a) + all_reduce(b)          one matmul_all_reduce of a + b

The graph does not change.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.passes import find_region as reduce_region
from overlap_inductor.passes.find_gather import find_gather
from overlap_inductor.passes.find_gather import is_weight_gather
from overlap_inductor.passes.find_reduce import find_reduce
from overlap_inductor.report.report import NearMiss
from overlap_inductor.sites import beside
from overlap_inductor.sites import collectives as finding
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import naming
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import ReduceNodes
from overlap_inductor.torch_compat import operators

aten = tools.aten


class SiteFinder:
    """One walk over a graph's collectives.

    Attributes:
        idle: names of collectives to whose sites a reduction leaves no matmul.
        left: matmuls of other sites, which a reduction reads as plain tensors.
        sites, near_misses: what ``run`` found, in graph order.
    """

    def __init__(self, graph: fx.Graph, phase: str, idle: Collection[str] = ()) -> None:
        self.graph, self.phase, self.idle = graph, phase, idle
        self.left: set[fx.Node] = set()
        self.sites: list[OverlapSite] = []
        self.near_misses: list[NearMiss] = []
        self._merged: set[fx.Node] = set()
        self._found: dict[fx.Node, tuple[GatherNodes | None, list[Reason]]] = {}

    @functools.cached_property
    def _collectives(self) -> dict[fx.Node, tuple[fx.Node, str, CollectiveNode | Reason]]:
        return {found[0]: found for found in finding.find_collectives(self.graph)}

    @functools.cached_property
    def _ordinals(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self._collectives)}

    def run(self) -> SiteFinder:
        for node, kind, found in self._collectives.values():
            if isinstance(found, Reason):
                self._miss(node, kind, found)
            elif node not in self._merged:
                self._classify(found)
        return self

    def _classify(self, collective: CollectiveNode) -> None:
        if collective.kind == "all_gather":
            self._gather(collective)
        elif collective.kind in ("reduce_scatter", "all_reduce"):
            partners = self._added_later(collective) if collective.kind == "all_reduce" else None
            self._reduce([collective], collective.wait) if partners is None else self._reduce(*partners)
        else:
            self._miss(
                collective.node,
                collective.kind,
                Reason("pattern_not_available", "all-to-all sites are not overlapped in this version"),
            )

    def _gather(self, collective: CollectiveNode) -> None:
        if not tools.shape(collective.input):
            self._miss(collective.node, "all_gather", Reason("no_matmul", beside.NO_MATMUL))
            return
        nodes, obstacles = self._gathered(collective)
        if nodes is not None:
            if is_weight_gather(nodes, self.phase):
                reason = Reason(
                    "fsdp_weight_gather",
                    f"{collective.input.name} is a weight gathered for use (FSDP): left to bucketing and prefetching",
                )
                self._miss(collective.node, "all_gather", reason, nodes.consumers[0].matmul.node)
                return
            first = nodes.consumers[0]
            self._add("all_gather_matmul", collective, nodes, _logical_dim(nodes), first.role)
            return
        # The gathered tensor may itself be a matmul's output.
        reduced, obstacle, _ = find_reduce([collective], collective.wait)
        if reduced is None:
            reduced, obstacle = reduce_region.find([collective], collective.wait, self._owned(), obstacle)
        if reduced is not None:
            self._add("matmul_all_gather", collective, reduced, None, reduced.role, obstacle)
            return
        obstacles = obstacles + [o for o in (obstacle,) if o is not None]
        self._miss(collective.node, "all_gather", obstacles[0] if obstacles else beside.reason(collective))

    def _added_later(self, collective: CollectiveNode) -> tuple[list[CollectiveNode], fx.Node] | None:
        """``(all-reduces, their sum)`` if ``collective`` is one of several all-reduces whose results are only added to
        each other, else ``None``. One all-reduce of the sum of their inputs gives the same (linearity)."""
        terms, total = [collective], collective.wait
        sums: list[tuple[list[CollectiveNode], fx.Node]] = []
        while (above := self._sum_of_like(collective, total)) is not None:
            more, total = above
            if any(m.node is t.node for m in more for t in terms):
                break
            terms = terms + more
            sums.append((terms, total))
        for found, result in reversed(sums):
            nodes, obstacle, _ = find_reduce(found, result, self._owned())
            if nodes is not None and obstacle is None:
                self._merged.update(c.node for c in found)
                return found, result
        return None

    def _sum_of_like(self, collective: CollectiveNode, term: fx.Node) -> tuple[list[CollectiveNode], fx.Node] | None:
        """``(all-reduces in the other term, sum)`` if ``term`` is only added to all-reduces of the same kind, else
        ``None``."""
        total = next(iter(term.users)) if len(term.users) == 1 else None
        if (
            total is None
            or total.target is not aten.add.Tensor
            or total.kwargs
            or not all(isinstance(a, fx.Node) for a in total.args)
        ):
            return None
        others = [a for a in total.args if a is not term]
        same_shape = [str(s) for s in tools.shape(term)] == [str(s) for s in tools.shape(total)]
        if (
            len(others) != 1
            or not same_shape
            or tools.dtype(total) != tools.dtype(term)
            or collective.reduce_op not in ("sum", "avg")
        ):
            return None
        found = self._all_reduces_in(others[0], collective)  # type: ignore[arg-type]
        return (found, total) if found is not None else None

    def _all_reduces_in(self, term: fx.Node, like: CollectiveNode) -> list[CollectiveNode] | None:
        """The all-reduces that ``term`` is a sum of, if all have the group, op, shape and dtype of ``like``; else
        ``None``."""
        found, pending = [], [term]
        while pending:
            node = pending.pop()
            if len(node.users) != 1 or [str(s) for s in tools.shape(node)] != [str(s) for s in tools.shape(like.wait)]:
                return None
            if tools.dtype(node) != tools.dtype(like.wait):
                return None
            if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
                pending += reversed(node.args)  # type: ignore[arg-type]
                continue
            one = self._all_reduce_of(node)
            if one is None or one.group_name != like.group_name or one.reduce_op != like.reduce_op:
                return None
            found.append(one)
        return found

    def _all_reduce_of(self, wait: fx.Node) -> CollectiveNode | None:
        if wait.target is not torch.ops._c10d_functional.wait_tensor.default:
            return None
        _, kind, found = self._collectives.get(wait.args[0], (None, "", None))  # type: ignore[call-overload]
        return found if kind == "all_reduce" and isinstance(found, CollectiveNode) else None

    def _owned(self) -> set[fx.Node]:
        """Matmuls of all gather sites, and of the sites found so far. Gather sites later in the graph count, because a
        sum of all-reduces is found at its first one."""
        gathered = {
            c.matmul.node
            for node, nodes in self._gather_sites.items()
            if node.name not in self.idle
            for c in nodes.consumers
        }
        return gathered | {
            m.node for site in self.sites if site.collectives[0].node.name not in self.idle for m in site.matmuls
        }

    @functools.cached_property
    def _gather_sites(self) -> dict[fx.Node, GatherNodes]:
        gathers = [
            f
            for _, kind, f in self._collectives.values()
            if kind == "all_gather" and isinstance(f, CollectiveNode) and tools.shape(f.input)
        ]
        found = {c.node: self._gathered(c)[0] for c in gathers}
        return {
            node: nodes
            for node, nodes in found.items()
            if nodes is not None and not is_weight_gather(nodes, self.phase)
        }

    def _gathered(self, collective: CollectiveNode) -> tuple[GatherNodes | None, list[Reason]]:
        if collective.node not in self._found:
            self._found[collective.node] = find_gather(collective)
        return self._found[collective.node]

    def _reduce(self, collectives: list[CollectiveNode], result: fx.Node) -> None:
        nodes, obstacle, left = find_reduce(collectives, result, self._owned())
        self.left.update(left)
        first = collectives[0]
        if nodes is None:
            nodes, obstacle = reduce_region.find(collectives, result, self._owned(), obstacle)
        if nodes is None:
            self._miss(first.node, first.kind, obstacle or beside.reason(first))
            return
        pattern = "matmul_reduce_scatter" if first.kind == "reduce_scatter" else "matmul_all_reduce"
        dim = nodes.sharded.dim if first.kind == "reduce_scatter" else None
        self._add(pattern, first, nodes, dim, nodes.role if dim is not None else None, obstacle)

    def _add(
        self,
        pattern: str,
        collective: CollectiveNode,
        nodes: GatherNodes | ReduceNodes,
        dim: int | None,
        role: str | None,
        obstacle: Reason | None = None,
    ) -> None:
        if isinstance(nodes, GatherNodes):
            matmuls = [c.matmul.describe(c.role) for c in nodes.consumers]
            anchor = nodes.consumers[0].matmul.node
        else:
            matmuls = [m.describe(nodes.role) for m in nodes.leaves]
            anchor = nodes.leaves[0].node
        facts = finding.describe(collective.node, collective.kind, dim, role)
        module = naming.module_of(anchor) or naming.module_of(collective.node)
        # The id must be the same on all ranks. What the collective moves and its place among the graph's collectives
        # are. Node names are not, because Inductor numbers them after other work in the graph. Matmuls are not: a rank
        # may have another size of a dim, a bias, or padding of its own.
        ordinal = self._ordinals[collective.node]
        moves = f"{facts.reduce_op}:{facts.dtype}:{tools.size_text(tools.shape(collective.input)[-1])}"
        identity = naming.site_id(pattern, module, self.phase, ordinal, moves)
        self.sites.append(
            OverlapSite(
                SiteFacts(identity, pattern, module or anchor.name, facts, tuple(matmuls)), nodes, obstacle=obstacle
            )
        )

    def _miss(self, node: fx.Node, kind: str, reason: Reason, anchor: fx.Node | None = None) -> None:
        module = naming.module_of(anchor or node)
        self.near_misses.append(NearMiss(finding.describe(node, kind), reason, module))


def _logical_dim(nodes: GatherNodes) -> int | None:
    """The dim that the user gathered, before the tensor was flattened for the matmul: the dim of the ``cat`` that joins
    the shards, else 0."""
    sources = [n for n in nodes.through if n.target is aten.cat.default]
    return operators.argument(sources[0], "dim") if sources else 0

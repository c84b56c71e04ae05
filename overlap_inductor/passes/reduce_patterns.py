# SPDX-License-Identifier: Apache-2.0
"""Find the sites whose matmuls compute a collective's input::

    mm(x, w) -> reduce_scatter             matmul_reduce_scatter
    mm(x, w) -> all_reduce                 matmul_all_reduce
    all_reduce(a) + all_reduce(b)          one matmul_all_reduce of a + b
    mm(x, w) -> all_gather                 matmul_all_gather

If ``find_reduce`` finds no site, ``find_region`` searches again. It also follows ``cat``, and reductions over a dim.
The reduction of a gradient is no site if a setting of Inductor already hides it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes import examples
from overlap_inductor.passes import find_region as reduce_region
from overlap_inductor.passes.find_reduce import find_reduce
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites import gradients
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.torch_compat import operators

aten = tools.aten


class MatmulReduceScatter:
    """Pattern ``matmul -> reduce-scatter`` (see ``Pattern``)."""

    name = "matmul_reduce_scatter"
    kind = "reduce_scatter"
    early = False
    example = examples.MATMUL_REDUCE_SCATTER

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        return _found([collective], collective.wait, search, scatters=True)


class MatmulAllReduce:
    """Pattern ``matmul -> all-reduce`` (see ``Pattern``). All-reduces of one group, op, shape and dtype that are only
    added to each other become one site, if the op is ``sum`` or ``avg``. The all-reduces stay apart if this site would
    have to stay as written."""

    name = "matmul_all_reduce"
    kind = "all_reduce"
    early = False
    example = examples.MATMUL_ALL_REDUCE

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        hidden = gradients.kept_because(collective) is not None and gradients.is_weight_gradient(
            collective, search.phase
        )
        sums = None if hidden else _added_later(collective, search)
        merged, result = sums or ([collective], collective.wait)
        return _found(merged, result, search, scatters=False)


class MatmulAllGather:
    """Pattern ``matmul -> all-gather`` of the matmul's output (see ``Pattern``)."""

    name = "matmul_all_gather"
    kind = "all_gather"
    early = False
    example = examples.MATMUL_ALL_GATHER

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        nodes, obstacle, _ = find_reduce([collective], collective.wait)
        if nodes is None:
            nodes, obstacle = reduce_region.find([collective], collective.wait, search.owned(), obstacle)
        if nodes is None:
            return Miss([] if obstacle is None else [obstacle])
        return Match(nodes, None, nodes.role, obstacle)


def _found(collectives: list[CollectiveNode], result: fx.Node, search: Search, scatters: bool) -> Match | Miss:
    nodes, obstacle, left = find_reduce(collectives, result, search.owned())
    if nodes is None:
        nodes, obstacle = reduce_region.find(collectives, result, search.owned(), obstacle)
    if (kept := _kept_gradient(collectives[0], nodes, obstacle, search.phase)) is not None:
        return replace(kept, left=left)
    if nodes is None:
        return Miss([] if obstacle is None else [obstacle], left=left)
    dim, role = (nodes.sharded.dim, nodes.role) if scatters else (None, None)
    return Match(nodes, dim, role, obstacle, left)


def _kept_gradient(
    collective: CollectiveNode, nodes: ReduceNodes | None, obstacle: Reason | None, phase: str
) -> Miss | None:
    """The answer if ``collective`` reduces a gradient and a setting of Inductor hides it, or if it stays as written
    because no matmul computes the gradient; else ``None``."""
    if not gradients.is_weight_gradient(collective, phase):
        return None
    other = gradients.other_maker(collective) if nodes is None or obstacle is not None else None
    reason = gradients.kept_because(collective) or (other[1] if other is not None else None)
    if reason is None:
        return None
    anchor = nodes.matmuls[0].node if nodes is not None else other[0] if other is not None else None
    return Miss([reason], final=True, anchor=anchor)


def _added_later(collective: CollectiveNode, search: Search) -> tuple[list[CollectiveNode], fx.Node] | None:
    """The longest sum of all-reduces, beginning with ``collective``, that can be one site: ``(all-reduces, sum)``, or
    ``None``. One all-reduce of their summed inputs gives the same result up to rounding."""
    terms, total = [collective], collective.wait
    sums: list[tuple[list[CollectiveNode], fx.Node]] = []
    while (above := _sum_of_like(collective, total, search)) is not None:
        more, total = above
        if any(m.node is t.node for m in more for t in terms):
            break
        terms = terms + more
        sums.append((terms, total))
    for found, result in reversed(sums):
        nodes, obstacle, _ = find_reduce(found, result, search.owned())
        if nodes is not None and obstacle is None:
            search.merged.update(c.node for c in found)
            return found, result
    return None


def _sum_of_like(
    collective: CollectiveNode, term: fx.Node, search: Search
) -> tuple[list[CollectiveNode], fx.Node] | None:
    """``(all-reduces in the other term, sum)`` if the only reader of ``term`` adds it to all-reduces like
    ``collective``; else ``None``."""
    total = next(iter(term.users)) if len(term.users) == 1 else None
    if total is None or collective.reduce_op not in ("sum", "avg"):
        return None
    others = [a for a in _summands(total) if a is not term]
    if len(others) != 1 or not tools.same_shape(term, total) or tools.dtype(total) != tools.dtype(term):
        return None
    found = _all_reduces_in(others[0], collective, search)
    return (found, total) if found is not None else None


def _all_reduces_in(term: fx.Node, like: CollectiveNode, search: Search) -> list[CollectiveNode] | None:
    """The all-reduces of which ``term`` is a sum. ``None`` if one has another group, op, shape or dtype than ``like``,
    or if a node of the sum has another reader."""
    found, pending = [], [term]
    while pending:
        node = pending.pop()
        if len(node.users) != 1 or not tools.same_shape(node, like.wait) or tools.dtype(node) != tools.dtype(like.wait):
            return None
        if terms := _summands(node):
            pending += reversed(terms)
            continue
        one = _all_reduce_of(node, search)
        if one is None or one.group_name != like.group_name or one.reduce_op != like.reduce_op:
            return None
        found.append(one)
    return found


def _summands(node: fx.Node) -> list[fx.Node]:
    """The two nodes that ``node`` adds without a factor; ``[]`` if it does anything else."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    nodes = [a for a in node.args if isinstance(a, fx.Node)]
    return nodes if len(nodes) == len(node.args) else []


def _all_reduce_of(wait: fx.Node, search: Search) -> CollectiveNode | None:
    if not operators.is_wait(wait) or not isinstance(wait.args[0], fx.Node):
        return None
    _, kind, found = search.collectives.get(wait.args[0], (None, "", None))
    return found if kind == "all_reduce" and isinstance(found, CollectiveNode) else None

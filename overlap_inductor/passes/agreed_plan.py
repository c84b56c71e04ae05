"""Write the ``ExchangePlan`` of a graph: one line for each transfer, equal on all ranks that move the same bytes in the
same way.

A line names the group, the collective and the dtype. For an overlapped site it also names the shape, pattern, schedule,
transport, and the parameters that both ends must share::

    g0: all_gather bfloat16 [2048, 8192] in all_gather_matmul by ring/p2p (route=ring, sub_chunks=4)
    g0: all_reduce bfloat16 kept

Sizes are those of the collective, which are equal on all ranks. Symbols are named in order of appearance (``d0``),
because ranks may have named the same size differently. Groups are named the same way (``g0``), because ranks of one
mesh are in different groups of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.lowerings.ring import looped_gather as looping_gather
from overlap_inductor.lowerings.ring import unrolled_gather as ring_gather
from overlap_inductor.passes import plan as planner
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import ReduceNodes
from overlap_inductor.sites.padded_output import gathered_shape
from overlap_inductor.sites.placement import between
from overlap_inductor.torch_compat.distributed import group_ranks
from overlap_inductor.version import __version__

_OWN = {"epilogue", "matmuls", "unrolled"}
"""Parameters of what a rank computes for itself, which lines leave out. If unrolled steps cut differently from the
looping op, the words of ``_cut`` differ."""


class _Names:
    """Names of groups and symbols in their order of appearance."""

    def __init__(self) -> None:
        self.groups: dict[str, str] = {}
        self.symbols: dict[Any, Any] = {}

    def group(self, name: str) -> str:
        return self.groups.setdefault(name, f"g{len(self.groups)}")

    def size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            self.symbols.setdefault(symbol, sympy.Symbol(f"d{len(self.symbols)}", integer=True))
        return str(expression.xreplace(self.symbols))

    def shape(self, shape: list[Any]) -> str:
        return f"[{', '.join(map(self.size, shape))}]"


class SiteFootprint:
    """What one overlapped site moves. It is read before the rewrite erases the site's nodes. ``lines`` writes it when
    the site's place in the order is known."""

    def __init__(self, site: OverlapSite, config: OverlapConfig) -> None:
        first = site.collectives[0]
        facts = site.facts
        self.group = first.group_name
        self.added = len(site.collectives) - 1
        op = f"({first.reduce_op})" if first.reduce_op else ""
        self.what = f"{first.kind}{op} {str(tools.dtype(first.input)).removeprefix('torch.')}"
        self.shape = tools.shape(first.input)
        self.pattern = facts.pattern
        plan = site.decision.plan if site.decision is not None else []
        self.pieces = [(p, _shared_parameters(site, p)) for p in plan]
        one_op = any(p.schedule not in ("keep", "ring") for p in plan)
        self.sent = "" if isinstance(site.nodes, ReduceNodes) else _sent(site.nodes, plan)
        self.cut = _cut(site, plan)
        nodes = site.nodes
        # Sizes stay symbolic here. ``lines`` names the symbols when the line's place is known.
        self.order: list[tuple[int, Any]] = []
        if isinstance(nodes, ReduceNodes):
            self.order = _order(nodes.leaf_layout, nodes.layouts[nodes.computed[0]])
        # A one-op schedule holds workspace under the site's id. Its tiles depend on the role of the sharded dim.
        needs = planner.workspace([site]).get(self.group) if one_op else None
        self.held = f" as {facts.id} {facts.matmuls[0].role} {needs} of {config.workspace_limit} MiB" if needs else ""

    def lines(self, names: _Names) -> list[str]:
        """The line of the site's transfer, then one for each all-reduce whose result is added to the first one's."""
        return [self._line(names), *([f"{names.group(self.group)}: {self.what} added to the one before"] * self.added)]

    def _line(self, names: _Names) -> str:
        cut = f" cut {names.shape(self.cut[0])}{self.cut[1]}" if self.cut is not None else ""
        if self.order:
            cut += f" in order {[place for place, _ in self.order]} of {names.shape([size for _, size in self.order])}"
        how = "; ".join(_how(piece, parameters) for piece, parameters in self.pieces)
        return (
            f"{names.group(self.group)}: {self.what} {names.shape(self.shape)}{cut}{self.sent} in {self.pattern} by"
            f" {how}{self.held}"
        )


def _how(piece: PlanPiece, parameters: Mapping[str, Any]) -> str:
    name = piece.schedule if piece.transport is None else f"{piece.schedule}/{piece.transport}"
    values = f" ({', '.join(f'{k}={v}' for k, v in sorted(parameters.items()))})" if parameters else ""
    return name + values + (f" for tokens {piece.tokens[0]} to {piece.tokens[1]}" if piece.tokens != (0, None) else "")


def _shared_parameters(site: OverlapSite, piece: PlanPiece) -> dict[str, Any]:
    parameters = {k: v for k, v in piece.parameters.items() if k not in _OWN}
    if parameters.get("route") == "travel" and not piece.parameters.get("unrolled", True):
        # The looping ops have no travelling accumulator.
        parameters["route"] = "owner"
    return parameters


def _sent(nodes: GatherNodes, plan: list[PlanPiece]) -> str:
    """What is computed on a shard before it is sent, as text. Unrolled steps compute nothing before; an op computes all
    nodes that stand between the gather and its matmuls."""
    if all(p.parameters.get("unrolled", p.schedule == "keep") for p in plan):
        return ""
    # In graph order. Node names are left out, because they depend on the rest of the rank's graph. View-like nodes are
    # skipped, and so are the pieces that a cat joins.
    computed = sorted(
        n for n in between(nodes) if n not in nodes.through and (tools.is_pointwise(n) or n in nodes.layouts)
    )
    places = {n: i for i, n in enumerate(computed)}

    def name(node: fx.Node) -> str:
        """A name for an input: ``v0``, ``v1``, ... for computed nodes, ``x`` for the gathered tensor in any form,
        ``other`` for a tensor from elsewhere."""
        while node in nodes.through:
            node = nodes.through[node]
        return f"v{places[node]}" if node in places else "x" if node is nodes.collective.wait else "other"

    words = [
        f"{n.target}({', '.join(map(str, (fx.map_arg(n.args, name), fx.map_arg(n.kwargs, name))))})" for n in computed
    ]
    return f" behind {', '.join(words)}" if words else ""


def _cut(site: OverlapSite, plan: list[PlanPiece]) -> tuple[list[Any], str] | None:
    """``(sizes, words)`` that say what is cut into sub-chunks; ``None`` for a gather without sub-chunks.

    The sizes are, for a gather, the rows of a shard that are cut; for a gathered output, all its rows; for a reduction,
    the outer and the chunk size of the dim that is cut.
    """
    nodes, looping = site.nodes, any(not p.parameters.get("unrolled", True) for p in plan)
    if isinstance(nodes, GatherNodes):
        if all(p.parameters.get("sub_chunks", 1) == 1 for p in plan):
            return None
        forms, lead = looping_gather.forms_of(nodes) if looping else None, ring_gather.leading_atom(nodes)
        return (
            [looping_gather.shard_shape(nodes, forms)[0]]
            if forms is not None
            else [lead.size]
            if lead is not None
            else []
        ), ""
    if nodes.collectives[0].kind == "all_gather":
        # The rows with padding: a rank may compute fewer rows than it sends.
        return gathered_shape(nodes)[:1], ""
    outer, dim = nodes.sharded.outer, nodes.sharded.dim
    # The looping op moves the rows to the front before it cuts.
    moved = " rows in front" if looping and not (isinstance(outer, int) and outer == 1 and dim == 0) else ""
    return [outer, nodes.sharded.chunk], f" on dim {dim}{moved}"


def _order(leaf: Layout, sent: Layout) -> list[tuple[int, Any]]:
    """How the matmul's result orders the elements of the collective's input: ``(place in the input, size)`` of each run
    of dims that are consecutive in both; empty if the order is the same."""
    places = {_key(atom): i for i, atom in enumerate(sent.flat())}
    runs: list[list[Any]] = []
    newest = None
    for atom in leaf.flat():
        place = places[_key(atom)]
        if newest is not None and place == newest + 1:
            runs[-1].append(atom)
        else:
            runs.append([atom])
        newest = place
    first = [places[_key(run[0])] for run in runs]
    return [(sorted(first).index(f), product(run)) for f, run in zip(first, runs, strict=True)] if len(runs) > 1 else []


def _key(atom: Atom) -> int | str:
    """A key of an atom. All rank atoms share one, because a ``cat`` that moves the rank to the front makes a new
    atom."""
    return "rank" if atom.rank else id(atom)


def footprints(sites: list[OverlapSite], config: OverlapConfig) -> dict[str, SiteFootprint]:
    """``{site id: footprint}`` for ``plan_of``. Call it before the sites are rewritten."""
    return {site.facts.id: SiteFootprint(site, config) for site in sites}


def plan_of(
    graph: fx.Graph, config: OverlapConfig, sites: Mapping[str, SiteFootprint], first_op: Mapping[fx.Node, str]
) -> tuple[ExchangePlan, list[str]]:
    """``(what the graph exchanges, its groups' names in the order g0, g1, ...)``. ``first_op`` maps the first op of
    each rewritten site to the site's id."""
    names = _Names()
    steps = []
    for node in graph.nodes:
        if node in first_op:
            steps += sites[first_op[node]].lines(names)
        elif (kind := collectives.kept_kind(node)) is not None:
            group = collectives.group_name(node)
            # A group of one rank exchanges nothing. The same collective may have a larger group on other ranks.
            if group is not None and len(group_ranks(group) or ()) != 1:
                steps.append(f"{names.group(group)}: {kind} kept")
    groups = (tuple(names.groups),)
    plan = ExchangePlan(__version__, config.mode, tuple(steps), bool(first_op), dict(config.cache_key()), groups)
    return plan, list(names.groups)

# SPDX-License-Identifier: Apache-2.0
"""Write the ``ExchangePlan`` of a graph: one line for each collective that all ranks of a group call.

The ranks compare their plans before they exchange data. The line of an overlapped site names all that the ranks must
share::

    g0: all_gather bfloat16 [2048, 8192] in all_gather_matmul by ring/p2p (route=ring, sub_chunks=4)
    g0: all_reduce bfloat16 kept                            # a collective that stays in the graph

Further lines name the program (a hash of the ops) of each rewritten stretch. Such a stretch divides tokens among the
ranks. The last lines name the groups whose kept collectives stay in the graph's order.

Symbols (``d0``) and groups (``g0``) are named in order of appearance, because their own names differ between ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.stretch import DIVIDED
from overlap_inductor.lowerings.registry import schedule_named
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.passes import plan as planner
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.torch_compat.distributed import group_ranks
from overlap_inductor.version import __version__


class _Names:
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
    """What one overlapped site moves, read before the rewrite erases the site's nodes."""

    def __init__(self, site: DecidedSite, config: OverlapConfig) -> None:
        first = site.collectives[0]
        facts = site.facts
        self.group = first.group_name
        self.what = _what(first)
        self.further = [(_what(c), *_beside(site, c)) for c in site.collectives[1:]]
        # If the parts of an exchange are uneven, a rank knows only its own numbers of rows. So the plan names none.
        shape = tools.shape(first.input)
        self.shape = ["uneven", *shape[1:]] if site.nodes.uneven_rows() else shape
        self.pattern = facts.pattern
        plan = site.decision.plan
        terms = [_terms(site, piece) for piece in plan]
        self.pieces = [(piece, t.parameters) for piece, t in zip(plan, terms, strict=True)]
        ahead = site.nodes.computed_ahead() if any(t.computes_ahead for t in terms) else []
        self.ahead = f" behind {', '.join(ahead)}" if ahead else ""
        self.cut = next((t.cut for t in terms if t.cut is not None), None)
        # Sizes stay symbolic here, because ``lines`` names symbols in the order of the lines.
        layouts = site.nodes.order_sent()
        self.order = _order(*layouts) if layouts is not None else []
        # The ranks share the site's workspace, and find it by the site's id. Which tiles the ranks exchange in this
        # workspace depends on the role of the sharded dim. So the line names the id and the role.
        needs = planner.workspace([site]).get(self.group)
        self.held = f" as {facts.id} {facts.matmuls[0].role} {needs} of {config.workspace_limit} MiB" if needs else ""

    def lines(self, names: _Names) -> list[str]:
        """The line of the site's transfer, then one line for each further collective of the site."""
        further = [
            f"{names.group(self.group)}: {what}{'' if shape is None else f' {names.shape(shape)}'} {how} the one before"
            for what, how, shape in self.further
        ]
        return [self._line(names), *further]

    def _line(self, names: _Names) -> str:
        # For example `` cut [48] on dim 0 in order [1, 0] of [4, 8]``: the sizes of the dims that are cut, which dims
        # they are, the runs' numbers (``_order``), and the runs' sizes.
        cut = f" cut {names.shape(self.cut[0])}{self.cut[1]}" if self.cut is not None else ""
        if self.order:
            cut += f" in order {[place for place, _ in self.order]} of {names.shape([size for _, size in self.order])}"
        how = "; ".join(_how(piece, parameters) for piece, parameters in self.pieces)
        return (
            f"{names.group(self.group)}: {self.what} {names.shape(self.shape)}{cut}{self.ahead} in {self.pattern} by"
            f" {how}{self.held}"
        )


def _beside(site: DecidedSite, collective: CollectiveNode) -> tuple[str, list[Any] | None]:
    """``(words, shape or None)`` for the plan's line of a further collective of a site. In the line, "the one before"
    follows the words. The words are:

    - ``with``: it moves together with the first collective. All ranks know its shape, so the shape is named.
    - ``added to``: its result is added to the first collective's result.
    - ``returning rows of``: it returns the rows that the first collective sent.
    """
    if collective in site.nodes.moved:
        return "with", tools.shape(collective.input)
    return ("added to" if site.nodes.is_sum else "returning rows of"), None


def _what(collective: CollectiveNode) -> str:
    op = f"({collective.reduce_op})" if collective.reduce_op else ""
    return f"{collective.kind}{op} {str(tools.dtype(collective.input)).removeprefix('torch.')}"


def _how(piece: PlanPiece, parameters: Mapping[str, Any]) -> str:
    name = piece.schedule if piece.transport is None else f"{piece.schedule}/{piece.transport}"
    values = f" ({', '.join(f'{k}={v}' for k, v in sorted(parameters.items()))})" if parameters else ""
    return name + values + (f" for tokens {piece.tokens[0]} to {piece.tokens[1]}" if piece.tokens != (0, None) else "")


def _terms(site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
    if piece.schedule == "keep":
        return ExchangeTerms({}, None, False)
    return schedule_named(piece.schedule).exchange(site, piece)


def _order(pieces: Layout, sent: Layout) -> list[tuple[int, Any]]:
    """How the order of elements differs between two layouts (``SiteNodes.order_sent``): ``pieces``, in which a site's
    pieces are sent or received, and ``sent``, that of the collective's tensor. A *run* is a sequence of atoms (factors
    of a dim: ``layouts.Atom``) that follow each other in both layouts. Runs are numbered in the order of ``sent``.
    Returns ``(number, size)`` of each run, in the order of ``pieces``. The list is empty if the orders are equal."""
    places = {_key(atom): i for i, atom in enumerate(sent.flat())}
    runs: list[tuple[int, list[Atom]]] = []
    newest = None
    for atom in pieces.flat():
        place = places.get(_key(atom), -1)
        if place < 0 and same_size(atom.size, 1):
            # An atom of size 1 may be in one layout only, and does not affect the order.
            continue
        if newest is not None and place == newest + 1:
            runs[-1][1].append(atom)
        else:
            runs.append((place, [atom]))
        newest = place if place >= 0 else None
    first = sorted(place for place, _ in runs)
    return [(first.index(place), product(run)) for place, run in runs] if len(runs) > 1 else []


def _key(atom: Atom) -> int | str:
    """A key of an atom. An atom that counts the ranks is a rank atom. A ``cat`` that moves the rank atom to the front
    makes a new rank atom. So all rank atoms share one key."""
    return "rank" if atom.rank else id(atom)


def footprints(sites: list[DecidedSite], config: OverlapConfig) -> dict[str, SiteFootprint]:
    """``{site id: footprint}`` for ``plan_of``. Call it before the sites are rewritten."""
    return {site.facts.id: SiteFootprint(site, config) for site in sites}


def plan_of(
    graph: fx.Graph,
    config: OverlapConfig,
    sites: Mapping[str, SiteFootprint],
    first_op: Mapping[fx.Node, str],
    in_order: Collection[str] = (),
) -> tuple[ExchangePlan, list[str]]:
    """``(what the graph exchanges, this rank's names of g0, g1, ... in this order)``.

    Args:
        graph: the graph after the rewrite, or as written if ``first_op`` is empty.
        sites: the result of ``footprints``.
        first_op: ``{first op of a rewritten site: the site's id}``.
        in_order: groups whose kept collectives run in the graph's order.
    """
    names = _Names()
    steps = []
    for node in graph.nodes:
        if node in first_op:
            steps += sites[first_op[node]].lines(names)
        elif (kind := collectives.kept_kind(node)) is not None:
            group = collectives.group_name(node)
            # A group of one rank exchanges nothing. If the group is larger on another rank, the plans differ.
            if group is not None and len(group_ranks(group) or ()) != 1:
                steps.append(f"{names.group(group)}: {kind} kept")
    for group, program in graph.output_node().meta.get(DIVIDED, ()):
        steps.append(f"{names.group(group)}: tokens divided among the ranks by program {program}")
    steps += [f"{name}: kept collectives in the graph's order" for name in sorted(map(names.group, in_order))]
    groups = (tuple(names.groups),)
    overlaps = bool(first_op or in_order)
    plan = ExchangePlan(__version__, config.mode, tuple(steps), overlaps, dict(config.cache_key()), groups)
    return plan, list(names.groups)

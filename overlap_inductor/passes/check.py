# SPDX-License-Identifier: Apache-2.0
"""Check whether a site may be rewritten: an ordered list of small checks.

Each check has a reason code. A check returns ``None``, or a sentence that names the values that the check refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.placement import Placement
from overlap_inductor.torch_compat import operators

_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_FP8 = {
    getattr(torch, n)
    for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, n)
} | {torch.uint8}


@dataclass
class Context:
    """What the checks read in addition to the site.

    Attributes:
        refusal: why the compiled code cannot hold overlap ops (AOTInductor, for example), or ``None``.
        taken: the matmuls of accepted sites, each with its site's id.
        needed: nodes that must come before the steps of accepted sites. The value is the earliest anchor of the sites
            that need the node. An anchor is the node before which a site's steps are written (``Placement.anchor``).
        sunk: nodes of accepted sites that the rewrite will move down. The value is the anchor to which the node moves.
    """

    config: OverlapConfig
    refusal: str | None = None
    taken: dict[fx.Node, str] = field(default_factory=dict)
    needed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sunk: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def accept(self, site: OverlapSite) -> None:
        self.taken.update({m.node: site.facts.id for m in site.matmuls})
        free = [p for p in site.nodes.places() if p.obstacle is None and _crossing(site, p, self) is None]
        for placement in free[:1]:
            for node in _read(placement):
                self.needed[node] = min(placement.anchor, self.needed.get(node, placement.anchor))
            self.sunk.update(dict.fromkeys(_sunk(site, placement), placement.anchor))


Check = Callable[[OverlapSite, Context], str | None]
CHECKS: list[tuple[str, Check]] = []


def check(code: str) -> Callable[[Check], Check]:
    """Register a check under its reason code."""

    def register(function: Check) -> Check:
        CHECKS.append((code, function))
        return function

    return register


@check("backend_not_supported")
def _backend(site: OverlapSite, context: Context) -> str | None:
    return context.refusal


@check("switched_off")
def _switched_off(site: OverlapSite, context: Context) -> str | None:
    if site.facts.pattern not in context.config.patterns:
        return f"pattern {site.facts.pattern} is not in OVERLAP_INDUCTOR_PATTERNS={','.join(context.config.patterns)}"
    if context.config.schedule == "keep":
        return "OVERLAP_INDUCTOR_SCHEDULE=keep leaves every site as written"
    return None


@check("world_size_one")
def _world_size(site: OverlapSite, context: Context) -> str | None:
    if site.facts.collective.world_size < 2:
        return f"the group {site.facts.collective.group_name!r} has one rank, so the collective moves nothing"
    return None


@check("reduce_op")
def _reduce_op(site: OverlapSite, context: Context) -> str | None:
    op = site.facts.collective.reduce_op
    if op is not None and op not in ("sum", "avg"):
        return f"the reduction is {op!r}; expected sum or avg, because steps only add partial results"
    return None


@check("dtype")
def _dtype(site: OverlapSite, context: Context) -> str | None:
    for matmul in site.matmuls:
        for node in matmul.factors:
            allowed = {"scaled_mm": _DTYPES | _FP8, "int_mm": {torch.int8}}.get(matmul.kind, _DTYPES)
            if tools.dtype(node) not in allowed:
                return f"{matmul.node.name} multiplies {tools.dtype(node)}; expected {_listed(allowed)}"
    moved = tools.dtype(site.collectives[0].input)
    integers = {torch.int8, torch.int32} if all(m.kind == "int_mm" for m in site.matmuls) else set()
    if moved not in _DTYPES | _FP8 | integers:
        return f"the collective moves {moved}; expected {_listed(_DTYPES | _FP8 | integers)}"
    if moved in integers and site.facts.collective.reduce_op == "avg":
        return f"the collective averages {moved}; expected sum, because each library rounds integers in its own way"
    if site.facts.collective.reduce_op and moved in _FP8:
        return f"the collective sums {moved}; expected a dtype of at least 16 bits, because partial sums are sent in it"
    return None


def _listed(dtypes: set[torch.dtype]) -> str:
    *first, last = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


@check("other_users")
def _obstacle(site: OverlapSite, context: Context) -> str | None:
    return site.obstacle.text if site.obstacle is not None and site.obstacle.code == "other_users" else None


@check("strides")
def _strides(site: OverlapSite, context: Context) -> str | None:
    for collective in site.collectives:
        value = tools.value(collective.input)
        if value.layout is not torch.strided:
            return f"{collective.input.name} has layout {value.layout}; expected a strided tensor"
    return None


@check("dynamic_shape")
def _dynamic(site: OverlapSite, context: Context) -> str | None:
    nodes, rows = [c.input for c in site.collectives], site.nodes.uneven_rows()
    for node in nodes + [n for m in site.matmuls for n in m.factors]:
        if tools.has_unbacked([s for s in tools.shape(node) if not any(same_size(s, r) for r in rows)]):
            return f"{node.name} has a size that is only known at run time: {[str(s) for s in tools.shape(node)]}"
    return None


@check("not_divisible")
def _not_divisible(site: OverlapSite, context: Context) -> str | None:
    if site.facts.collective.kind != "reduce_scatter":
        return None
    rows = tools.shape(site.collectives[0].input)[0]
    world_size = site.facts.collective.world_size
    if isinstance(rows, int) and rows % world_size:
        return f"{rows} rows are scattered over {world_size} ranks; expected a multiple of {world_size}"
    return None


@check("shares_nodes")
def _shares(site: OverlapSite, context: Context) -> str | None:
    for matmul in site.matmuls:
        owner = context.taken.get(matmul.node)
        if owner is not None:
            return f"{matmul.node.name} already belongs to site {owner}"
    return None


@check("stream_boundary")
def _streams(site: OverlapSite, context: Context) -> str | None:
    marks = {repr(n.meta.get("custom", {}).get("stream")) for n in _members(site)}
    if len(marks) <= 1:
        return None
    return f"the site's nodes are on different streams: {', '.join(sorted(marks))}; expected one stream"


@check("mutation")
def _mutation(site: OverlapSite, context: Context) -> str | None:
    """Refuse a site if a node between its nodes writes in place a tensor that the site reads. The rewrite could move
    the read across the write."""
    members = [*_members(site), *site.nodes.others()]
    read = {id(i): i for n in members for i in n.all_input_nodes}
    node, last = min(members), max(members)
    while node is not last:
        node = node.next
        for argument in operators.written(node) if node is not last else ():
            if id(argument) in read:
                return f"{argument.name} is written in place by {node.name} between the site's nodes"
    return None


@check("hoist")
def _hoist(site: OverlapSite, context: Context) -> str | None:
    """Refuse a site if an immovable node would have to move, or if the site and an accepted site would wait for each
    other."""
    placement = site.nodes.place()
    if placement is None:
        return None
    if placement.obstacle is not None:
        blocking = f"{placement.obstacle.name} ({placement.obstacle.target})"
        return f"the site's steps need {blocking}, which is computed too late and cannot be moved up"
    # Refuse the site only if accepted sites block every place without an obstacle.
    crossings = [_crossing(site, p, context) for p in site.nodes.places() if p.obstacle is None]
    return None if None in crossings else crossings[0]


def _crossing(site: OverlapSite, placement: Placement, context: Context) -> str | None:
    """Why this site at ``placement`` and an accepted site would wait for each other's results, or ``None``. The rewrite
    moves the nodes of accepted sites before it moves this site's nodes. So at the same anchor, the nodes of accepted
    sites come first. Then this site may read them, but accepted sites cannot read nodes that move down for this site.
    """
    late = {n for n in _read(placement) if n in context.sunk and placement.anchor < context.sunk[n]}
    if late:
        return f"another overlapped site would compute {_names(late)} only after this site's steps need {_them(late)}"
    early = {n for n in _sunk(site, placement) if n in context.needed and not placement.anchor < context.needed[n]}
    if early:
        return f"this site would compute {_names(early)} only after another overlapped site needs {_them(early)}"
    return None


def _read(placement: Placement) -> set[fx.Node]:
    """The nodes that must come before the steps: operands, the nodes moved up for them, and what those nodes read."""
    return {*placement.operands, *(n for node in placement.hoisted for n in (node, *node.all_input_nodes))}


def _sunk(site: OverlapSite, placement: Placement) -> set[fx.Node]:
    """The nodes that the rewrite moves down for the site, with the site's matmuls. Empty if no node moves down."""
    return {*placement.sunk, *(m.node for m in site.matmuls)} if placement.sunk else set()


def _names(nodes: set[fx.Node]) -> str:
    return ", ".join(sorted(n.name for n in nodes))


def _them(nodes: set[fx.Node]) -> str:
    return "it" if len(nodes) == 1 else "them"


def _members(site: OverlapSite) -> list[fx.Node]:
    return [n for c in site.collectives for n in (c.node, c.wait)] + [m.node for m in site.matmuls]


def refuse(site: OverlapSite, context: Context) -> Reason | None:
    for code, function in CHECKS:
        text = function(site, context)
        if text is not None:
            return Reason(code, text)
    return None

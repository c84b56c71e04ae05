"""Grouped matmuls (the experts of a mixture, ``aten._grouped_mm`` and what libraries put in its place) near a collective: for a reason that says so, since nothing cuts them."""

from __future__ import annotations

from torch import fx

from overlap_inductor.passes import matmuls
from overlap_inductor.passes.site_nodes import CollectiveNode
from overlap_inductor.schedule import Reason

STEPS = 12
"""Nodes from the collective to the matmul, at most: weighting, reordering and summing what the experts return takes six to nine."""


def beside(collective: CollectiveNode) -> Reason | None:
    """The grouped matmul whose result a reduction sums up, or which multiplies what a gather brings."""
    found = _nearest(collective.wait, forward=True) if collective.kind == "all_gather" else None
    found = found or _nearest(collective.input, forward=False)
    if found is None:
        return None
    return Reason("grouped_matmul", f"{found.name} ({found.target}) stands beside it, a matmul of groups of rows whose sizes are only known when it runs: it is not cut in this version")


def _nearest(start: fx.Node, forward: bool) -> fx.Node | None:
    """The grouped matmul nearest to ``start`` on ways without another matmul or collective."""
    frontier, seen = [start], {start}
    for _ in range(STEPS):
        reached: list[fx.Node] = []
        for node in frontier:
            if "grouped_mm" in str(node.target):
                return node
            if node is not start and (matmuls.parse(node) is not None or "_c10d_functional" in str(node.target)):
                continue
            reached += [n for n in (node.users if forward else node.all_input_nodes) if n.op == "call_function" and n not in seen]
            seen.update(reached)
        frontier = reached
    return None

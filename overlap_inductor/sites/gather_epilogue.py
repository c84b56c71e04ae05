# SPDX-License-Identifier: Apache-2.0
"""Find the epilogue of a gather or of an all-to-all: pointwise nodes after its matmuls, computed on each piece.

Transfers can run under these nodes. For ``silu(gate) * up`` before a down-projection::

    g = mm(wait, a); u = mm(wait, b); y = mul(silu(g), u); mm(y, c)
    ->  for each piece of wait: mm, mm, silu, mul
        y from the pieces; mm(y, c)

Contract:

- The nodes read only each other, scalars, single rows, and those matmuls of the site that are cut by rows.
- Outside the epilogue, only matmuls, collectives and the output read them, directly or through views. A node with any
  other reader is left out, because Inductor can fuse it into most other readers at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.gather_nodes import Epilogue
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators


def find_epilogue(collective: CollectiveNode, consumers: list[GatherConsumer]) -> Epilogue:
    """The largest epilogue after the matmuls in ``consumers`` that are cut by rows. A matmul that is not cut like the
    first of them is left out. The epilogue is empty if no node can be in it."""
    first = next((c for c in consumers if c.role == "M" and c.matmul.kind in ("mm", "addmm")), None)
    if first is None:
        return Epilogue()
    base = [
        c.matmul.node for c in consumers if c.role == "M" and c.matmul.kind in ("mm", "addmm") and _cut_alike(c, first)
    ]
    region = _Region(collective.wait, base)
    region.grow()
    region.shrink()
    return region.epilogue()


def _cut_alike(a: GatherConsumer, b: GatherConsumer) -> bool:
    same = same_size(a.sharded.chunk, b.sharded.chunk) and same_size(a.sharded.outer, b.sharded.outer)
    return same and not a.sharded.short and a.layout.same_elements(b.layout)


@dataclass
class _Region:
    wait: fx.Node
    base: list[fx.Node]
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    known: dict[fx.Node, bool] = field(default_factory=dict)

    def _inside(self, node: fx.Node) -> bool:
        return node in self.nodes or node in self.base

    def grow(self) -> None:
        def taken(node: fx.Node) -> bool:
            accepted = node.op == "call_function" and tools.is_tensor(node) and self._accepts(node)
            if accepted:
                self.nodes[node] = None
            return accepted

        tools.walk(self.base, taken)

    def _accepts(self, node: fx.Node) -> bool:
        inputs = list(tools.tensor_inputs(node))
        inside = [n for n in inputs if self._inside(n)]
        if not inside or matmuls.parse(node) is not None:
            return False
        if tools.is_reshape(node):
            return same_size(tools.shape(node)[-1], tools.shape(inside[0])[-1])
        if not tools.is_pointwise(node) or tools.is_bitcast(node) or operators.is_mutable(node):
            return False
        if operators.has_tag(node, torch.Tag.nondeterministic_seeded):
            return False
        if any(tools.depends_on(n, self.wait, self.known) for n in node.all_input_nodes if not tools.is_tensor(n)):
            return False
        return all(tools.same_shape(node, n) if self._inside(n) else self._is_row(n) for n in inputs)

    def _is_row(self, node: fx.Node) -> bool:
        """Whether ``node`` is a scalar or one row, and is not computed from the gathered tensor."""
        leading = tools.shape(node)[:-1]
        return all(isinstance(s, int) and s == 1 for s in leading) and not tools.depends_on(node, self.wait, self.known)

    def shrink(self) -> None:
        """Remove nodes until none is left that:

        - has a reader outside into which Inductor would fuse it;
        - is a view at the end of the region;
        - reads a removed node.
        """
        changed = True
        while changed:
            changed = False
            for node in reversed(list(self.nodes)):
                outside = [u for u in node.users if u not in self.nodes]
                dangling = tools.is_reshape(node) and len(outside) == len(node.users)
                orphaned = not any(self._inside(n) for n in tools.tensor_inputs(node))
                partly = any(
                    n not in self.nodes and n not in self.base and tools.depends_on(n, self.wait, self.known)
                    for n in tools.tensor_inputs(node)
                )
                if dangling or orphaned or partly or any(not _stored_for(u) for u in outside):
                    del self.nodes[node]
                    changed = True

    def epilogue(self) -> Epilogue:
        if all(tools.is_reshape(n) for n in self.nodes):
            return Epilogue()
        members = [*self.base, *self.nodes]
        outputs = [n for n in members if any(u not in self.nodes for u in n.users)]
        externals = [n for m in self.nodes if not tools.is_reshape(m) for n in m.all_input_nodes if not self._inside(n)]
        return Epilogue(list(self.nodes), outputs, list(dict.fromkeys(externals)), list(self.base))


def _stored_for(user: fx.Node, depth: int = 8) -> bool:
    """Whether ``user`` needs its input in memory. A view needs it if all its readers do."""
    if user.op == "output" or matmuls.parse(user) is not None or operators.is_functional_collective(user):
        return True
    if depth and (tools.is_reshape(user) or tools.permutation(user) is not None):
        return all(_stored_for(u, depth - 1) for u in user.users)
    return False

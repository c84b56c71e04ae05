# SPDX-License-Identifier: Apache-2.0
"""Write some of the columns of a tensor that is computed from a grouped matmul.

The columns are the last dim, N. Column n of every node between the grouped matmul and the tensor depends on column n
of the grouped matmul only::

    y   = _grouped_mm(x, w, ends)                              y_i   = _grouped_mm(x, w[:, :, columns], ends)
    out = reshape(index(y * s, [places]), [T, k, N]).sum(1)    out_i = reshape(index(y_i * s, ...), [T, k, n]).sum(1)

Every expert keeps all of its rows, so a part needs no sort and no new ``ends``. The number of rows may be symbolic.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
NODES = 16
"""The most nodes between a grouped matmul and the collective."""


class Columns:
    """The nodes from ``matmul`` to ``top``, which can be computed for some columns at a time.

    Raises:
        ValueError: a node cannot. The text names it.
    """

    def __init__(self, matmul: GroupedMatmul, top: fx.Node) -> None:
        self.grouped, self.top, self.width = matmul.grouped, top, tools.shape(matmul.grouped)[-1]
        if not isinstance(self.width, int):
            raise ValueError(f"the number of columns is only known at run time: {self.width}")
        self.computed = self._between()
        for node in self.computed:
            if (reason := self._why_not(node)) is not None:
                raise ValueError(f"{node.name} ({node.target}) {reason}")

    def write(self, emit: StepEmitter, start: int, length: int, after: fx.Node) -> fx.Node:
        """Columns ``start`` to ``start + length`` of ``top``. The grouped matmul runs after the node ``after``."""
        done: dict[fx.Node, fx.Node] = {}
        for node in self.computed:
            read = {n: done[n] if n in done else self._cut(emit, n, start, length) for n in tools.tensor_inputs(node)}
            if node is self.grouped:
                lhs, rhs, *others = node.args
                rhs = emit.narrow(rhs, 2, start, length)
                product = emit.call(node.target, lhs, rhs, *others, **node.kwargs)
                done[node] = emit.call(torch.ops.overlap_inductor.after.default, product, after)
            elif tools.is_reshape(node):
                done[node] = emit.reshape(done[node.args[0]], [*tools.shape(node)[:-1], length])
            elif node.target is aten.index.Tensor:
                done[node] = emit.call(node.target, done[node.args[0]], *node.args[1:])
            else:
                copied = emit.graph.node_copy(node, functools.partial(_replacement, read))
                done[node] = emit.annotate(copied)
        return done[self.top]

    def _cut(self, emit: StepEmitter, node: fx.Node, start: int, length: int) -> fx.Node:
        """``node``, which these nodes read but do not compute. A tensor with N columns is cut."""
        shape = tools.shape(node)
        return emit.narrow(node, len(shape) - 1, start, length) if shape and shape[-1] == self.width else node

    def _between(self) -> list[fx.Node]:
        """The grouped matmul, and the nodes from it to ``top``, in graph order."""
        known: dict[fx.Node, bool] = {}
        found, pending = {self.grouped}, [self.top]
        while pending:
            node = pending.pop()
            if node in found or not tools.depends_on(node, self.grouped, known):
                continue
            found.add(node)
            if len(found) > NODES:
                raise ValueError(f"more than {NODES} nodes are between {self.grouped.name} and the collective")
            pending += node.all_input_nodes
        return sorted(found)

    def _why_not(self, node: fx.Node) -> str | None:
        if is_grouped(node):
            return None if node is self.grouped else "is a second grouped matmul"
        shape, source = tools.shape(node), node.args[0]
        if not shape or not same_size(shape[-1], self.width):
            return f"has shape {[str(s) for s in shape]}; expected {self.width} columns"
        if operators.is_mutable(node) or operators.has_tag(node, torch.Tag.nondeterministic_seeded):
            return "writes in place or draws random numbers"
        if tools.is_reshape(node):
            return None if source in self.computed else "reshapes another tensor"
        if node.target is aten.index.Tensor:
            rows, *others = node.args[1]
            plain = source in self.computed and rows not in self.computed and not any(others)
            return None if plain and len(tools.shape(rows)) == 1 else "takes other elements than rows"
        if node.target is aten.sum.dim_IntList:
            dims = operators.argument(node, "dim") or ()
            last = len(tools.shape(source)) - 1
            return None if dims and all(d % (last + 1) != last for d in dims) else "sums columns"
        pointwise = tools.is_pointwise(node) and not tools.is_bitcast(node)
        return None if pointwise and all(map(self._is_aligned, tools.tensor_inputs(node))) else "mixes columns"

    def _is_aligned(self, node: fx.Node) -> bool:
        """Whether a pointwise op reads column n of ``node`` for its own column n, or the same value for all columns."""
        shape = tools.shape(node)
        return not shape or isinstance(shape[-1], int) and shape[-1] in (1, self.width)


def _replacement(read: dict[fx.Node, fx.Node], node: Any) -> Any:
    return read.get(node, node)

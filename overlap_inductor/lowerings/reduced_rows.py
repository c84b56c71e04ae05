# SPDX-License-Identifier: Apache-2.0
"""Rewrite matmuls and the collective after them as one op."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import bias_row
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.lowerings.rows import transposed
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten

Biases = list[fx.Node | None]
"""The bias of each matmul of a site; ``None`` for a matmul without a bias."""
ReduceCall = Callable[[list[fx.Node], list[fx.Node], Biases, str], fx.Node]
"""Writes the op: ``(left operands, right operands, biases, reduce_op) -> node``, whose value is ``(result, next
token)``."""


def reduced_in_rows(pattern: str, nodes: ReduceNodes, biases: Biases) -> bool:
    """Whether each rank's part of the matmuls' result consists of whole rows, and the collective's input has the
    result's order of elements.

    - All-reduce: the rows of a part must be consecutive.
    - Reduce-scatter: if there is no bias, a part may consist of whole columns instead.
    - All-gather: there must be one matmul.
    """
    sharded = nodes.sharded
    one_run = pattern == "matmul_all_gather" or isinstance(sharded.outer, int) and sharded.outer == 1
    in_order = sharded.dim == 0 and one_run
    if pattern != "matmul_reduce_scatter" and not in_order:
        return False
    if sharded.dim == 1 and any(b is not None for b in biases):
        return False
    target = nodes.layouts[nodes.computed[0]].without_rank()
    same = nodes.leaf_layout.without_rank().same_elements(target)
    return same and (pattern != "matmul_all_gather" or len(nodes.leaves) == 1)


def biases_of(nodes: ReduceNodes, terms: list[fx.Node]) -> Biases | None:
    """The bias of each matmul, if ``terms`` add up to the matmuls' results plus single rows.

    A single row is added to every row of a result. The row becomes the bias of a matmul of the same width and dtype
    that has no bias yet and whose kind is in ``PLAIN``. Returns ``None`` if

    - the sum has a row that no matmul can take;
    - the sum holds anything else (a factor, a scalar);
    - the sum does not hold each matmul's result exactly once;
    - the site has a ``Region``. A vector in a region may lie along the rows, not the columns.
    """
    if nodes.region is not None:
        return None
    leaves = {m.node: m for m in nodes.leaves}
    found: list[fx.Node] = []
    rows: list[fx.Node] = []
    pending: list[Any] = list(terms)
    while pending:
        node = pending.pop()
        if node in leaves:
            found.append(node)
            if nodes.bias_of(leaves[node]) is None and leaves[node].bias is not None:
                pending.append(leaves[node].bias)
        elif node in nodes.through:
            pending.append(nodes.through[node])
        elif isinstance(node, fx.Node) and node.target in tools.SAME:
            pending.append(node.args[0])
        elif isinstance(node, fx.Node) and node.target is aten.add.Tensor and not node.kwargs:
            pending += node.args
        elif node in nodes.externals and is_row(node):
            rows.append(node)
        else:
            return None
    biases = [nodes.bias_of(m) for m in nodes.leaves]
    for row in rows:
        plain = [i for i, m in enumerate(nodes.leaves) if m.kind in PLAIN and _of_one_width(row, m.node)]
        free = next((i for i in plain if biases[i] is None), None)
        if free is None:
            return None
        biases[free] = row
    return biases if len(found) == len(leaves) == len(set(found)) else None


def _of_one_width(row: fx.Node, matmul: fx.Node) -> bool:
    return same_size(tools.shape(row)[-1], tools.shape(matmul)[-1]) and tools.dtype(row) == tools.dtype(matmul)


def rewrite_reduce(
    emit: StepEmitter, nodes: ReduceNodes, call: ReduceCall, biases: Biases
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Lay out the operands, write the op with ``call`` and lay out its result. Returns ``(next token of the chain, {old
    node: its replacement})``. The result is contiguous and has the collective's shape. ``biases``: in the order of
    ``nodes.leaves``."""
    columns = nodes.sharded.dim == 1
    pairs = [_operands(emit, m, columns) for m in nodes.leaves]

    def in_ranks_order(x: fx.Node) -> fx.Node:
        # In an all-gather, each rank sends all of its rows in their order.
        gathers = nodes.collectives[0].kind == "all_gather"
        return x if gathers else rows_in_place(emit, x, nodes.sharded, from_ranks=False)

    def as_bias(x: fx.Node | None) -> fx.Node | None:
        return x if x is None else bias_row(emit, x) if is_row(x) else in_ranks_order(x)

    lhs = [in_ranks_order(emit.whole_chunks(a, 0, nodes.sharded)) for a, _ in pairs]
    out = call(lhs, [b for _, b in pairs], list(map(as_bias, biases)), nodes.collectives[0].reduce_op or "sum")
    result, chain = (emit.call(getitem, out, i) for i in range(2))
    result = emit.contiguous(transposed(emit, result)) if columns else result
    return chain, reduced(nodes, emit.reshape(result, tools.shape(nodes.collectives[0].node)))


def reduced(nodes: ReduceNodes, result: fx.Node) -> dict[fx.Node, fx.Node]:
    """``{old node: result}`` for the site's result and, if it has only one collective, for the collective and its
    wait."""
    replaced = {nodes.result: result}
    if len(nodes.collectives) == 1:
        replaced[nodes.collectives[0].node] = result
        replaced[nodes.collectives[0].wait] = result
    return replaced


def _operands(emit: StepEmitter, matmul: MatmulNode, columns: bool) -> tuple[fx.Node, fx.Node]:
    if columns:
        return transposed(emit, matmul.rhs), transposed(emit, matmul.lhs)
    return matmul.lhs, matmul.rhs

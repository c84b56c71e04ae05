# SPDX-License-Identifier: Apache-2.0
"""Write matmuls and the collective after them as one op: decide whether an op can compute the site, and lay out
operands and results for the op."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.one_op.rows import PLAIN
from overlap_inductor.lowerings.one_op.rows import Op
from overlap_inductor.lowerings.one_op.rows import bias_row
from overlap_inductor.lowerings.one_op.rows import is_row
from overlap_inductor.lowerings.one_op.rows import rows_in_place
from overlap_inductor.lowerings.one_op.rows import transposed
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten

Biases = list[fx.Node | None]
"""The bias of each matmul of a site; ``None`` for a matmul without a bias."""
ReduceCall = Callable[[list[fx.Node], list[fx.Node], Biases, str], fx.Node]
"""Writes the op into the graph: ``(left operands, right operands, biases, reduce_op) -> node``. The node's value is
``(result, next token)``."""


class ReduceRows:
    """See ``form.RowsForm``."""

    def served(self, site: OverlapSite) -> OverlapSite:
        return site

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReduceNodes)
        biases = biases_of(nodes, nodes.computed)
        if biases is None or any(b is not None and not is_row(b) for b in biases):
            return False
        return reduced_in_rows(site.facts.pattern, nodes, biases)

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return nodes_of(site, ReduceNodes).sharded.dim == 0

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        region = nodes_of(site, ReduceNodes).region
        return next(iter((*region.reduced, *region.joined)), None) if region is not None else None

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        if len(site.matmuls) == 1:
            return None
        if not sums:
            return f"{len(site.matmuls)} matmuls are added into one reduction; a {noun} computes only one"
        if (biased := sum(b is not None for b in summed(nodes_of(site, ReduceNodes)))) > 1:
            return f"{biased} of the matmuls that are added into one reduction have a bias; a {noun} adds only one"
        if len(dtypes := {str(tools.dtype(m.lhs)) for m in site.matmuls}) > 1:
            return f"matmuls of {' and '.join(sorted(dtypes))} are added into one reduction; expected one dtype"
        return None

    def why_not_scaled(self, site: OverlapSite) -> str | None:
        moved = tools.dtype(site.collectives[0].input)
        if moved not in (torch.bfloat16, torch.float16):
            return f"partial sums of {moved} are reduced; expected fp16 or bf16"
        return None

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ReduceNodes)

        def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: Biases, reduce_op: str) -> fx.Node:
            first, where = scales[0] if scales else (), (*own, reduce_op, emit.group_name, emit.site)
            if len(lhs) == 1:
                return emit.communicate(op(""), emit.chain, lhs[0], rhs[0], biases[0], *first, *where)
            # The op for sums adds the bias of its first matmul, so a matmul with a bias comes first.
            order = sorted(range(len(lhs)), key=lambda i: biases[i] is None)
            left, right = [lhs[i] for i in order], [rhs[i] for i in order]
            return emit.communicate(op("sum_"), emit.chain, left, right, biases[order[0]], *where)

        return rewrite_reduce(emit, nodes, reduce, summed(nodes))


def reduced_in_rows(pattern: str, nodes: ReduceNodes, biases: Biases) -> bool:
    """Whether each rank's part is a set of rows of the matmuls' result, with the elements in the result's order.

    A reduce-scatter may also cut columns, if there is no bias. An all-gather must have one matmul.
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
    """The bias of each matmul, if the sum of ``terms`` adds nothing but single rows to the matmuls' results.

    A single row is added to every row of the result. It becomes the bias of a plain matmul that has none. Returns
    ``None`` if the sum holds anything else (a factor, a scalar), if it does not hold each matmul's result exactly once,
    or if no matmul is left to take a row as its bias.
    """
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


def summed(nodes: ReduceNodes) -> Biases:
    """``biases_of`` for a site that was planned as a sum of matmuls. Raises ``RuntimeError`` if the graph has
    changed and has no such sum now."""
    biases = biases_of(nodes, nodes.computed)
    if biases is None:
        raise RuntimeError(
            "the site was planned as a sum of matmuls, but the graph has changed and has no such sum now"
        )
    return biases


def _of_one_width(row: fx.Node, matmul: fx.Node) -> bool:
    return same_size(tools.shape(row)[-1], tools.shape(matmul)[-1]) and tools.dtype(row) == tools.dtype(matmul)


def rewrite_reduce(
    emit: StepEmitter, nodes: ReduceNodes, call: ReduceCall, biases: Biases
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Lay out the operands, write the op with ``call`` and lay out its result. Returns ``(next token of the chain, {old
    node: its replacement})``. The result has the collective's shape and is contiguous. ``biases``: one for each matmul
    in ``nodes.leaves``."""
    columns = nodes.sharded.dim == 1
    pairs = [_operands(emit, m, columns) for m in nodes.leaves]

    def in_ranks_order(x: fx.Node) -> fx.Node:
        # If the output is gathered, each rank sends all of its rows, so its rows stay in their order.
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
    """``{old node: result}``. The old nodes are the site's result and, if there is only one collective, the collective
    and its wait."""
    replaced = {nodes.result: result}
    if len(nodes.collectives) == 1:
        replaced[nodes.collectives[0].node] = result
        replaced[nodes.collectives[0].wait] = result
    return replaced


def _operands(emit: StepEmitter, matmul: MatmulNode, columns: bool) -> tuple[fx.Node, fx.Node]:
    if columns:
        return transposed(emit, matmul.rhs), transposed(emit, matmul.lhs)
    return matmul.lhs, matmul.rhs

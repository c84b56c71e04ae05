# SPDX-License-Identifier: Apache-2.0
"""Writes the sums of experts' rows, and the reduction of the sums, as one looping op.

The steps of a grouped matmul are the ops that compute experts' rows (``sites.row_steps``). The looping op

- takes rows by number
- runs the other steps of one grouped matmul as a ``RowProgram``
- sums each token's rows
- reduces the sums over the ranks
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.ring.grouped_rows import places_from_zero
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.row_operands import Operands
from overlap_inductor.sites.row_operands import operands_of
from overlap_inductor.sites.row_steps import is_gather
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
_PATTERNS = ("matmul_all_reduce", "matmul_reduce_scatter")
"""The patterns that have an op ``grouped_<pattern>``."""


def computes(pattern: str, nodes: ReduceNodes) -> bool:
    matmul = _matmul(nodes)
    if pattern not in _PATTERNS or matmul is None:
        return False
    try:
        _operands(matmul)
    except ValueError:
        return False
    return True


def rewrite(
    emit: StepEmitter, pattern: str, nodes: ReduceNodes, parts: int, floor: int
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the site as one op. Arguments and results are those of ``looped_reduce.rewrite``."""
    matmul, collective = _matmul(nodes), nodes.collectives[0]
    if matmul is None:
        raise RuntimeError(
            "the site was planned as one looping op, but the graph has changed and no looping op can compute it now"
        )
    gathers, operands = _operands(matmul)
    out = emit.communicate(
        getattr(overlap, f"grouped_{pattern}").default,
        emit.chain,
        [*(n.args[0] for n in gathers), *operands.rows],
        [*(n.args[1][0] for n in gathers), *(None for _ in operands.rows)],
        operands.whole,
        matmul.ends,
        places_from_zero(emit, matmul),
        operands.program.to_text(),
        parts,
        floor,
        tools.dtype(collective.input),
        collective.reduce_op or "sum",
        emit.group_name,
        emit.site,
        *emit.transport,
    )
    result, chain = (emit.call(getitem, out, i) for i in range(2))
    return chain, reduced_rows.reduced(nodes, emit.reshape(result, tools.shape(collective.node)))


def _operands(matmul: GroupedMatmul) -> tuple[list[fx.Node], Operands]:
    """The steps that take rows by number (``is_gather``), and the operands and program of the other steps. The program
    reads the rows that were taken. Raises ``ValueError`` if an argument of a step cannot be written as text."""
    steps = matmul.steps
    gathers = [n for n in steps if is_gather(n)]
    computed = [n for n in steps if n not in gathers]
    return gathers, operands_of(gathers, computed, matmul.ends, matmul.index.args[0], [])


def _matmul(nodes: ReduceNodes) -> GroupedMatmul | None:
    """The site's grouped matmul; ``None`` unless the site has

    - one leaf (``ReduceNodes.leaves``): a ``GroupedMatmul`` with the result ``[tokens, experts_a_token, N]``
    - a sum of each token's rows (``_sums_only``)
    - shards that are runs of consecutive tokens, without missing rows (``ShardedDim``)
    - a collective that moves the sums in their order
    """
    region, sharded = nodes.region, nodes.sharded
    (matmul, *others) = nodes.leaves
    if region is None or others or not isinstance(matmul, GroupedMatmul) or len(tools.shape(matmul.node)) != 3:
        return None
    in_rows = sharded.dim == 0 and isinstance(sharded.outer, int) and sharded.outer == 1 and not sharded.short
    if not in_rows or region.cut != 0 or not region.layout.same_elements(nodes.layouts[nodes.computed[0]]):
        return None
    return matmul if _sums_only(nodes, matmul) else None


def _sums_only(nodes: ReduceNodes, matmul: GroupedMatmul) -> bool:
    """Whether the collective's input sums the matmul's rows over dim 1, through views and at most one cast."""
    assert nodes.region is not None
    node, casts, sums = nodes.computed[0], 0, 0
    while node is not matmul.node:
        if node in nodes.region.reduced:
            plain = node.target is aten.sum.dim_IntList and operators.argument(node, "dtype") is None
            if not plain or nodes.region.reduced[node] != [1]:
                return False
            sums += 1
        elif tools.is_cast(node) and not tools.is_bitcast(node):
            # The op casts once, after the sum. Two casts can round twice; a cast before the sum rounds every row.
            casts += node.target not in tools.SAME
            if sums:
                return False
        elif node not in nodes.through:
            return False
        node = nodes.through.get(node, node.args[0])
    return sums == 1 and casts <= 1

# SPDX-License-Identifier: Apache-2.0
"""Write matmuls and the collective after them (reduce-scatter, all-reduce or all-gather) as one looping op.

Unlike ops of other schedules (``one_op.reduce_rows``), looping ops can add a bias of the result's shape. Looping ops
can also reduce in another dtype than the matmuls'. They compute no fp8 matmuls.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter

overlap = torch.ops.overlap_inductor


def computes(pattern: str, nodes: ReduceNodes) -> bool:
    found = biases_of(nodes)
    if found is None or any(m.kind not in PLAIN for m in nodes.leaves):
        return False
    if not all(map(bias_fits, nodes.leaves, found)):
        return False
    return reduced_rows.reduced_in_rows(pattern, nodes, found)


def biases_of(nodes: ReduceNodes) -> reduced_rows.Biases | None:
    """The bias of each matmul; ``None`` if the site computes more than a sum of matmuls and biases. If the
    site has one collective, a cast may stand before it: the op reduces in the cast's dtype."""
    inputs = nodes.computed
    return reduced_rows.biases_of(nodes, inputs if len(inputs) > 1 else [_before_cast(inputs[0], nodes)])


def planned_biases(nodes: ReduceNodes) -> reduced_rows.Biases:
    """``biases_of`` for a site that was planned as one looping op. Raises ``RuntimeError`` if no such op can compute it
    now."""
    biases = biases_of(nodes)
    if biases is None:
        raise RuntimeError(
            "the site was planned as one looping op, but the graph has changed and no looping op can compute it now"
        )
    return biases


def bias_fits(matmul: MatmulNode, bias: fx.Node | None) -> bool:
    """Whether ``bias`` is ``None``, one row as wide as the result, or a tensor of the result's shape."""
    if bias is None:
        return True
    mine, wanted = tools.shape(bias), tools.shape(matmul.node)
    if is_row(bias):
        return same_size(mine[-1], wanted[-1])
    return len(mine) == len(wanted) and all(same_size(a, b) for a, b in zip(mine, wanted, strict=True))


def _before_cast(node: fx.Node, nodes: ReduceNodes) -> fx.Node:
    """The input of a cast, if ``node`` is this cast or a view of it; else ``node``. Skips one cast only, because two
    can round twice."""
    cast = node
    while cast in nodes.through:
        cast = nodes.through[cast]
    is_cast = tools.is_cast(cast) and not tools.is_bitcast(cast)
    return cast.args[0] if is_cast else node


def chooses_at_run_time(pattern: str, nodes: ReduceNodes) -> bool:
    """Whether a looping op computes this site, and ranks' parts are rows. If so, the op knows the token count, and can
    run the plain collective for few tokens."""
    return computes(pattern, nodes) and nodes.sharded.dim == 0


def rewrite(
    emit: StepEmitter, pattern: str, nodes: ReduceNodes, parts: int, floor: int
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the site as one op. Returns ``(next token of the chain, {old node: its replacement})``. The result is
    contiguous and has the collective's shape. Below ``floor`` tokens, the op runs the plain collective.

    Raises:
        RuntimeError: no looping op can compute the site.
    """
    biases = planned_biases(nodes)
    dtype, where = tools.dtype(nodes.collectives[0].input), (emit.group_name, emit.site, *emit.transport)

    def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: list[fx.Node | None], reduce_op: str) -> fx.Node:
        if pattern == "matmul_all_gather":
            width = nodes.padded_shape[-1]
            gather = overlap.matmul_all_gather.default
            return emit.communicate(gather, emit.chain, lhs[0], rhs[0], biases[0], width, parts, floor, dtype, *where)
        op = getattr(overlap, pattern).default
        return emit.communicate(op, emit.chain, lhs, rhs, biases, parts, floor, dtype, reduce_op, *where)

    return reduced_rows.rewrite_reduce(emit, nodes, reduce, biases)

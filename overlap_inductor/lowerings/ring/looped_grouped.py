# SPDX-License-Identifier: Apache-2.0
"""Writes the sum of experts' rows and its reduction as one looping op of ``lowerings.ring.looped_grouped_ops``.

The op computes a grouped matmul whose rows are masked, weighted, brought into the tokens' order and summed for each
token. The sum must be there; the mask, the weights and the new order may each be missing. If a site has other ops, it
is only unrolled.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.ring.grouped_rows import places_from_zero
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.grouped import is_grouped
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
_PATTERNS = ("matmul_all_reduce", "matmul_reduce_scatter")
"""The patterns that have an op ``grouped_<pattern>``."""


@dataclass(frozen=True)
class _Terms:
    """What the op reads besides the matmul's operands. ``mask`` and ``shares`` are ``None`` if the site has no mask or
    no weights."""

    matmul: GroupedMatmul
    mask: fx.Node | None
    shares: fx.Node | None


def computes(pattern: str, nodes: ReduceNodes) -> bool:
    """Whether a looping op of this module can compute a site of ``pattern``."""
    return pattern in _PATTERNS and _terms(nodes) is not None


def rewrite(
    emit: StepEmitter, pattern: str, nodes: ReduceNodes, parts: int, floor: int
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """As ``looped_reduce.rewrite``."""
    terms = _terms(nodes)
    if terms is None:
        raise RuntimeError(
            "the site was planned as one looping op, but the graph has changed and no looping op can compute it now"
        )
    matmul, collective = terms.matmul, nodes.collectives[0]
    namespace, name = operators.qualified_name(matmul.grouped)
    out = emit.communicate(
        getattr(overlap, f"grouped_{pattern}").default,
        emit.chain,
        matmul.lhs,
        matmul.rhs,
        matmul.ends,
        places_from_zero(emit, matmul),
        terms.mask,
        terms.shares,
        f"{namespace}::{name}",
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


def _terms(nodes: ReduceNodes) -> _Terms | None:
    region, sharded = nodes.region, nodes.sharded
    (matmul, *others) = nodes.leaves
    if region is None or others or not isinstance(matmul, GroupedMatmul) or len(tools.shape(matmul.node)) != 3:
        return None
    in_rows = sharded.dim == 0 and isinstance(sharded.outer, int) and sharded.outer == 1 and not sharded.short
    if not in_rows or region.cut != 0 or not region.layout.same_elements(nodes.layouts[nodes.computed[0]]):
        return None
    return _weighted(matmul) if _sums_only(nodes, matmul) else None


def _sums_only(nodes: ReduceNodes, matmul: GroupedMatmul) -> bool:
    """Whether the collective's input is the sum of the matmul's rows over dim 1, seen through views and at most one
    cast."""
    assert nodes.region is not None
    node, casts, sums = nodes.computed[0], 0, 0
    while node is not matmul.node:
        if node in nodes.region.reduced:
            plain = node.target is aten.sum.dim_IntList and operators.argument(node, "dtype") is None
            if not plain or nodes.region.reduced[node] != [1]:
                return False
            sums += 1
        elif tools.is_cast(node) and not tools.is_bitcast(node):
            # Two casts can round twice, and so can a cast before the sum.
            casts += node.target not in tools.SAME
            if sums:
                return False
        elif node not in nodes.through:
            return False
        node = nodes.through.get(node, node.args[0])
    return sums == 1 and casts <= 1


def _weighted(matmul: GroupedMatmul) -> _Terms | None:
    """The terms, if the grouped matmul's rows are first masked by zeros and then multiplied by one factor each."""
    mask = shares = previous = None
    for node in matmul.inner:
        if node is matmul.index:
            break
        if is_grouped(node):
            previous = node
        elif node.target is aten.where.self and mask is None and shares is None and node.args[2] is previous:
            mask, zero, previous = node.args[0], node.args[1], node
            if not _is_column(mask) or zero.target is not aten.full.default or zero.args[1] != 0:
                return None
            if tools.shape(zero) or tools.dtype(node) != tools.dtype(matmul.grouped):
                return None
        elif node.target is aten.mul.Tensor and shares is None and previous in node.args:
            shares = next((n for n in node.args if n is not previous), None)
            previous = node
            if not tools.is_tensor(shares) or not _is_column(shares):
                return None
        else:
            return None
    return _Terms(matmul, mask, shares)


def _is_column(node: fx.Node) -> bool:
    shape = tools.shape(node)
    return len(shape) == 2 and same_size(shape[1], 1) and not same_size(shape[0], 1)

"""A reduction, or a gathered output, as one of the looping ops of ``lowerings.ring.looped_reduce_ops``: which sites
they compute.

Beyond what all ops do that are one a site (``looping``), these add a bias of the result's own shape and reduce in
another dtype than the matmuls'.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import ReduceNodes
from overlap_inductor.sites.padded_output import gathered_shape
from overlap_inductor.sites.step_emitter import StepEmitter

overlap = torch.ops.overlap_inductor


def computes(pattern: str, nodes: ReduceNodes) -> bool:
    """Whether a looping op computes this site."""
    biases = _biases(nodes)
    if biases is None or any(m.kind not in looping.PLAIN for m in nodes.leaves):
        return False
    if not all(map(_bias_fits, nodes.leaves, biases)):
        return False
    return looping.reduced_in_rows(pattern, nodes, biases)


def _biases(nodes: ReduceNodes) -> looping.Biases | None:
    terms = nodes.computed
    return looping.biases_of(nodes, terms if len(terms) > 1 else [_before_cast(terms[0], nodes)])


def _bias_fits(matmul: MatmulNode, bias: fx.Node | None) -> bool:
    """Whether it is one row, or has a row for each of the result's. (A scalar, or one number a row, is neither.)"""
    if bias is None:
        return True
    mine, wanted = tools.shape(bias), tools.shape(matmul.node)
    if looping.is_row(bias):
        return same_size(mine[-1], wanted[-1])
    return len(mine) == len(wanted) and all(same_size(a, b) for a, b in zip(mine, wanted, strict=True))


def _before_cast(node: fx.Node, nodes: ReduceNodes) -> fx.Node:
    """``node`` before its last change of dtype, if that is all that was done to the matmuls' sum (two could round
    twice)."""
    cast = node
    while cast in nodes.through:
        cast = nodes.through[cast]
    is_cast = tools.is_cast(cast) and not tools.is_bitcast(cast)
    return cast.args[0] if is_cast else node  # type: ignore[return-value]


def chooses_at_run_time(pattern: str, nodes: ReduceNodes) -> bool:
    """Whether the op can also tell from its rows how many tokens there are, to run the plain collective where they are
    few."""
    return computes(pattern, nodes) and nodes.sharded.dim == 0


def rewrite(emit: StepEmitter, site: OverlapSite, parts: int, floor: int) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """``(next token of the chain, what replaces which node)``. The result is contiguous, in the collective's shape."""
    nodes, pattern = site.nodes, site.facts.pattern
    assert isinstance(nodes, ReduceNodes)
    biases = _biases(nodes)
    if biases is None:
        raise RuntimeError("the site was planned as one looping op, which does not compute it any more")
    dtype, where = tools.dtype(nodes.collectives[0].input), (emit.group_name, emit.site)

    def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: list[fx.Node | None], reduce_op: str) -> fx.Node:
        if pattern == "matmul_all_gather":
            width = gathered_shape(nodes)[-1]
            gather = overlap.matmul_all_gather.default
            return emit.communicate(gather, emit.chain, lhs[0], rhs[0], biases[0], width, parts, floor, dtype, *where)
        op = getattr(overlap, pattern).default
        return emit.communicate(op, emit.chain, lhs, rhs, biases, parts, floor, dtype, reduce_op, *where)

    return looping.rewrite_reduce(emit, nodes, reduce, biases)

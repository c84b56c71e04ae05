"""A gather as the looping op of ``lowerings.ring.looped_gather_ops``: which sites it computes, and how their operands
and results are laid out for it.

The op sees a shard as one matrix in the collective's own order, and each matmul's operand as a row or a column of such
matrices, one a rank, as they are or transposed. Ranks that lie inside a dim (``[outer, rank, chunk]``) are brought in
front by a permute of the result's rows or, where the dim is contracted, of the other operand's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.lowerings.ring import unrolled_gather as ring_gather
from overlap_inductor.lowerings.ring.looped_gather_ops import Form
from overlap_inductor.lowerings.ring.looped_gather_ops import texts
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import GatherConsumer
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.placement import between
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


def forms_of(nodes: GatherNodes) -> list[Form] | None:
    """How each matmul reads the slices, or ``None`` where the op does not compute this site."""
    if len({tools.dtype(c.operand_node) for c in nodes.consumers}) > 1:
        return None
    if not all(map(_is_plain, nodes.consumers)) or not _gathers_operand(nodes):
        return None
    ways = []
    for _, shape in _readings(nodes.consumers[0], nodes):
        found = [next((f for f, seen in _readings(c, nodes) if _same(seen, shape)), None) for c in nodes.consumers]
        if None not in found:
            ways.append(found)
    # (A shard that is one row or column is read in two ways: better in one whose sub-chunks are some of its rows.)
    return min(ways, key=lambda forms: any(f.whole for f in forms), default=None)  # type: ignore[union-attr, arg-type, return-value]


def _is_plain(consumer: GatherConsumer) -> bool:
    if consumer.matmul.kind not in looping.PLAIN or consumer.role not in ("M", "N", "K"):
        return False
    if consumer.role == "K" and consumer.sharded.short:
        return False
    bias = consumer.matmul.bias
    return bias is None or len(tools.shape(bias)) == 1 and consumer.role != "N"


def _gathers_operand(nodes: GatherNodes) -> bool:
    """Whether what the matmuls read can be gathered: the gathered tensor itself, or one that is computed on it, row by
    row and for nothing else.

    Then the shards are computed on before they travel; never where that makes them longer, nor with another tensor,
    which may be the rank's own.
    """
    (operand, *others) = {looping.behind_views(c.operand_node, nodes) for c in nodes.consumers}
    wait = nodes.collective.wait
    if others or operand is wait:
        return not others
    members = {wait, *between(nodes)}
    users = {user for member in members for user in member.users}
    computed = members - set(nodes.through) - {wait}
    if any(n not in members and tools.is_tensor(n) for node in computed for n in node.all_input_nodes):
        return False
    return (
        users <= members | {c.matmul.node for c in nodes.consumers}
        and tools.dtype(operand).itemsize <= tools.dtype(wait).itemsize
    )


def _readings(consumer: GatherConsumer, nodes: GatherNodes) -> list[tuple[Form, list[Any]]]:
    """Forms in which the consumer's operand is made of shards, each with the matrix ``[m, k]`` that a shard is then
    (two, where one has a single row)."""
    left = consumer.layout if consumer.operand == "lhs" else consumer.layout.permute([1, 0])
    found = []
    for transposed in (False, True):
        slices = (left.permute([1, 0]) if transposed else left).without_rank()
        if nodes.raw.without_rank().same_elements(slices):
            found.append((Form(consumer.operand, consumer.role, transposed), slices.shape()))
    return found


def shard_shape(nodes: GatherNodes, forms: list[Form]) -> list[Any]:
    """The matrix ``[m, k]`` that a shard is for the op; sub-chunks are some of its rows."""
    return next(seen for form, seen in _readings(nodes.consumers[0], nodes) if form == forms[0])


def _same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(same_size(a, b) for a, b in zip(mine, theirs, strict=True))


def chooses_at_run_time(nodes: GatherNodes) -> bool:
    """Whether the op can also tell from a shard's rows how many tokens there are, to run the plain collective where
    they are few."""
    forms = forms_of(nodes)
    return forms is not None and all(f.transposed == f.contracted for f in forms)


def rewrite(
    emit: StepEmitter, nodes: GatherNodes, parts: int, floor: int, route: str
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """``(next token of the chain, what replaces which node)``, each in the shape and strides of what it replaces."""
    forms = forms_of(nodes)
    if forms is None:
        raise RuntimeError("the site was planned as one looping op, which does not compute it any more")
    first, shape = nodes.consumers[0], shard_shape(nodes, forms)
    operand = looping.behind_views(first.operand_node, nodes)
    computed = _computed(emit, nodes, operand)
    shard = emit.reshape(looping.as_bits_of(emit, computed, tools.dtype(first.operand_node)), shape)
    others = [_in_ranks_order(emit, c) for c in nodes.consumers]
    biases = [c.matmul.bias for c in nodes.consumers]
    op = overlap.all_gather_matmul.default
    out = emit.communicate(
        op, emit.chain, shard, others, biases, texts(forms), parts, floor, route, emit.group_name, emit.site
    )
    results, gathered, chain = (emit.call(looping.getitem, out, i) for i in range(3))
    replaced = {}
    for i, consumer in enumerate(nodes.consumers):
        result = emit.call(looping.getitem, results, i)
        dim = {"M": 0, "N": 1}.get(consumer.role)
        if dim is not None:
            whole = _in_place(emit, result, dim, consumer.sharded, from_ranks=True)
            result = emit.contiguous(emit.cut_to_size(whole, dim, consumer.sharded))
        replaced[consumer.matmul.node] = result
    return chain, replaced | looping.gathered_as(
        emit, nodes, gathered
    ) if operand is nodes.collective.wait else replaced


def _computed(emit: StepEmitter, nodes: GatherNodes, operand: fx.Node) -> fx.Node:
    """``operand``, between gather and matmuls, computed on this rank's shard before it travels, in the order of the
    shard's elements."""
    if not nodes.layouts:
        return ring_gather.evaluate(emit, nodes, operand, nodes.collective.input, {})
    raw = nodes.raw.without_rank()
    piece = row_pieces.RowPieces(emit, nodes, nodes.collective.input, raw, 0).of(operand)
    return emit.convert(piece, nodes.layouts[operand].without_rank(), raw)


def _in_ranks_order(emit: StepEmitter, consumer: GatherConsumer) -> fx.Node:
    """The matmul's other operand, the rows that meet the gathered ones in the ranks' order."""
    if consumer.role != "K":
        return consumer.other_node
    return _in_place(
        emit, consumer.other_node, 0 if consumer.operand == "lhs" else 1, consumer.sharded, from_ranks=False
    )


def _in_place(emit: StepEmitter, x: fx.Node, dim: int, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``x`` with the indices of ``dim`` brought from the ranks' order into the tensor's, or the other way."""
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        return x
    if dim == 0:
        return looping.rows_in_place(emit, x, sharded, from_ranks)
    turned = looping.rows_in_place(emit, looping.transposed(emit, x), sharded, from_ranks)
    return looping.transposed(emit, turned)

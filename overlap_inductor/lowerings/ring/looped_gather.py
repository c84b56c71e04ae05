# SPDX-License-Identifier: Apache-2.0
"""Write a gather as the looping op of ``looped_gather_ops``: choose the sites, lay out operands and results.

The op sees each shard as one matrix, whose elements are in the collective's order. The op joins shards in the order of
the ranks. If the gathered dim has the order ``[outer, rank, chunk]`` instead, its indices are permuted. If the matmul
contracts the gathered dim, they are permuted in the matmul's other operand, before the op. If not, they are permuted
in the result, after the op.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.ring.gather_pieces import evaluate
from overlap_inductor.lowerings.ring.looped_gather_ops import Form
from overlap_inductor.lowerings.ring.looped_gather_ops import texts
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import as_bits_of
from overlap_inductor.lowerings.rows import columns_in_place
from overlap_inductor.lowerings.rows import gathered_as
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import row_pieces
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


def forms_of(nodes: GatherNodes) -> list[Form] | None:
    """How each matmul reads the ranks' shards; ``None`` if the op cannot compute this site."""
    # A shard of one row or one column can be read plain or transposed, so there may be two lists of forms. Prefer a
    # list in which no form needs whole shards.
    return min(_ways(nodes), key=lambda forms: any(f.whole for f in forms), default=None)


def forms_by_rows(nodes: GatherNodes) -> list[Form] | None:
    """``forms_of`` for shards that may have different numbers of rows."""
    return next((forms for forms in _ways(nodes) if all(form.by_rows for form in forms)), None)


def _ways(nodes: GatherNodes) -> list[list[Form]]:
    """All ways to read the shards. A way has a form for each matmul."""
    if len({tools.dtype(c.operand_node) for c in nodes.consumers}) > 1:
        return []
    if not all(map(_is_plain, nodes.consumers)) or not _gathers_operand(nodes):
        return []
    ways: list[list[Form]] = []
    for _, shape in _readings(nodes.consumers[0], nodes):
        found = [next((f for f, seen in _readings(c, nodes) if _same(seen, shape)), None) for c in nodes.consumers]
        if all(found):
            ways.append([form for form in found if form is not None])
    return ways


def _is_plain(consumer: GatherConsumer) -> bool:
    if consumer.matmul.kind not in PLAIN or consumer.role not in ("M", "N", "K"):
        return False
    if consumer.role == "K" and consumer.sharded.short:
        return False
    bias = consumer.matmul.bias
    return bias is None or len(tools.shape(bias)) == 1 and consumer.role != "N"


def _gathers_operand(nodes: GatherNodes) -> bool:
    """Whether all matmuls read one operand that can be gathered. The gathered tensor itself can. So can an operand
    whose shard each rank can compute before it sends. For such an operand, all of these must hold:

    - only the operand is computed from the gathered tensor, and only the matmuls read the operand;
    - the operand is computed from the gathered tensor alone, because another tensor may differ between ranks;
    - its dtype is not wider than the shard's.
    """
    (operand, *others) = {nodes.behind_views(c.operand_node) for c in nodes.consumers}
    wait = nodes.collective.wait
    if others or operand is wait:
        return not others
    members = {wait, *nodes.between()}
    users = {user for member in members for user in member.users}
    computed = members - set(nodes.through) - {wait}
    if any(n not in members and tools.is_tensor(n) for node in computed for n in node.all_input_nodes):
        return False
    return (
        users <= members | {c.matmul.node for c in nodes.consumers}
        and tools.dtype(operand).itemsize <= tools.dtype(wait).itemsize
    )


def _readings(consumer: GatherConsumer, nodes: GatherNodes) -> list[tuple[Form, list[Any]]]:
    """``(form, sizes [m, k] of a shard)`` for each form in which the consumer can read its operand. There are two forms
    if a shard has one row or one column."""
    left = consumer.layout if consumer.operand == "lhs" else consumer.layout.permute([1, 0])
    found = []
    for turned in (False, True):
        slices = (left.permute([1, 0]) if turned else left).without_rank()
        if nodes.raw.without_rank().same_elements(slices):
            found.append((Form(consumer.operand, consumer.role, turned), slices.shape()))
    return found


def shard_shape(nodes: GatherNodes, forms: list[Form]) -> list[Any]:
    """The sizes ``[m, k]`` of a shard as the op sees it. A sub-chunk has some of the ``m`` rows."""
    return next(seen for form, seen in _readings(nodes.consumers[0], nodes) if form == forms[0])


def _same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(same_size(a, b) for a, b in zip(mine, theirs, strict=True))


def chooses_at_run_time(nodes: GatherNodes) -> bool:
    """Whether the op computes this site and knows the token count from a shard's rows. If so, it can run the plain
    collective for few tokens."""
    forms = forms_of(nodes)
    return forms is not None and all(f.by_rows for f in forms)


def rewrite(
    emit: StepEmitter, nodes: GatherNodes, parts: int, floor: int, route: str
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write the site as one op. Returns ``(next token of the chain, {old node: its replacement})``. A replacement has
    the old node's shape and strides. Below ``floor`` tokens, the op runs the plain collective.

    Raises:
        RuntimeError: no looping op can compute the site.
    """
    operand = nodes.behind_views(nodes.consumers[0].operand_node)
    shard = as_bits_of(emit, _computed(emit, nodes, operand), tools.dtype(nodes.consumers[0].operand_node))
    op, forms = overlap.all_gather_matmul.default, forms_of(nodes)
    chain, replaced, gathered = write(
        emit, nodes, op, forms, lambda shape: emit.reshape(shard, shape), (parts, floor, route)
    )
    return chain, replaced | gathered_as(emit, nodes, gathered) if operand is nodes.collective.wait else replaced


def write(
    emit: StepEmitter,
    nodes: GatherNodes,
    op: Any,
    forms: list[Form] | None,
    sent: Callable[[list[Any]], fx.Node],
    how: tuple[Any, ...],
) -> tuple[fx.Node, dict[fx.Node, fx.Node], fx.Node]:
    """Lay out the operands that are not gathered, write ``op`` and lay out its results. Returns ``(next
    token of the chain, {matmul: its replacement}, the shards of all ranks)``.

    Args:
        forms: how the op reads the shards; ``None`` if it cannot compute the site.
        sent: returns the tensor to send, given the sizes ``[m, k]`` of a shard as the op sees it.
        how: the op's arguments between the forms and the group's name.

    Raises:
        RuntimeError: no looping op can compute the site.
    """
    if forms is None:
        raise RuntimeError(
            "the site was planned as one looping op, but the graph has changed and no looping op can compute it now"
        )
    others = [_in_ranks_order(emit, c) for c in nodes.consumers]
    biases = [c.matmul.bias for c in nodes.consumers]
    where = (emit.group_name, emit.site, *emit.transport)
    operand = sent(shard_shape(nodes, forms))
    out = emit.communicate(op, emit.chain, operand, others, biases, texts(forms), *how, *where)
    results, gathered, chain = (emit.call(getitem, out, i) for i in range(3))
    replaced = {}
    for i, consumer in enumerate(nodes.consumers):
        result = emit.call(getitem, results, i)
        dim = {"M": 0, "N": 1}.get(consumer.role)
        if dim is not None:
            whole = _in_place(emit, result, dim, consumer.sharded, from_ranks=True)
            result = emit.contiguous(emit.cut_to_size(whole, dim, consumer.sharded))
        replaced[consumer.matmul.node] = result
    return chain, replaced, gathered


def _computed(emit: StepEmitter, nodes: GatherNodes, operand: fx.Node) -> fx.Node:
    """This rank's shard of ``operand``, in the order of the collective's input."""
    if not nodes.layouts:
        return evaluate(emit, nodes, operand, nodes.collective.input, {})
    raw = nodes.raw.without_rank()
    piece = row_pieces.RowPieces(emit, nodes, nodes.collective.input, raw, 0).of(operand)
    return emit.convert(piece, nodes.layouts[operand].without_rank(), raw)


def _in_ranks_order(emit: StepEmitter, consumer: GatherConsumer) -> fx.Node:
    """The matmul's other operand. If its contracted dim is the gathered one, that dim is put in the ranks' order."""
    if consumer.role != "K":
        return consumer.other_node
    return _in_place(
        emit, consumer.other_node, 0 if consumer.operand == "lhs" else 1, consumer.sharded, from_ranks=False
    )


def _in_place(emit: StepEmitter, x: fx.Node, dim: int, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``x`` with the indices of ``dim`` moved from the ranks' order to the tensor's own order. If not ``from_ranks``,
    they are moved from the tensor's own order to the ranks' order."""
    return (columns_in_place if dim else rows_in_place)(emit, x, sharded, from_ranks)

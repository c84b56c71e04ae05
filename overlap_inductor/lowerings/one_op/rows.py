"""A site as one op: which sites such ops compute, and how operands and results are laid out for them.

The ops of ``lowerings.ring.looped_reduce_ops`` (reductions) and of the schedules that are one op a site
(``lowerings.fused.ops`` ...) cut plain 2-D matmuls along leading rows in the ranks' order. Rows that lie otherwise are
brought there: ``[outer, rank, chunk]`` (a gather or scatter of an inner dim) by a permute of the result or of the left
operand, and a cut along columns by computing the transposed product, which the vendor's matmul does without a copy (a
fused kernel copies its left operand). A cut along the contracted dim is computed by the ring's op alone
(``looping_gather``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gathered import copies
from overlap_inductor.sites.gathered import gathered_used
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import GatherConsumer
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


PLAIN: tuple[str, ...] = ("mm", "addmm")
SCALED: tuple[str, ...] = ("scaled_mm",)
"""Kinds of matmuls that one op multiplies beside each other; the looping ops are of plain ones."""


def served(site: OverlapSite) -> OverlapSite:
    """``site`` with those of a gather's matmuls that one op computes beside each other, the ones that see the gathered
    tensor as the first of them does. The others stay as they stand, and read the gathered tensor behind the op (a
    weight's gradient, whose tokens are contracted). The site itself where there is none of either, or where some are
    scaled and some plain."""
    nodes = site.nodes
    if not isinstance(nodes, GatherNodes) or len({m.kind in SCALED for m in site.matmuls}) > 1:
        return site
    able = [
        c for c in nodes.consumers if c.matmul.kind in PLAIN and _one_bias_row(c.matmul) and _gathers_rows(c, nodes)
    ]
    able = [c for c in able if _one_shape([able[0], c])]
    return replace(site, nodes=replace(nodes, consumers=able)) if 0 < len(able) < len(nodes.consumers) else site


Biases = list[fx.Node | None]
"""Of each matmul of a reduction."""


def _one_bias_row(matmul: MatmulNode) -> bool:
    return matmul.bias is None or len(tools.shape(matmul.bias)) == 1


def loopable(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether a looping op computes this site, or an op that does the same with matmuls of other ``kinds``."""
    if any(m.kind not in kinds for m in site.matmuls):
        return False
    if isinstance(site.nodes, GatherNodes):
        return (
            all(map(_one_bias_row, site.matmuls))
            and all(_gathers_rows(c, site.nodes) for c in site.nodes.consumers)
            and _one_shape(site.nodes.consumers)
        )
    biases = biases_of(site.nodes, site.nodes.computed)
    if biases is None or any(b is not None and not is_row(b) for b in biases):
        return False
    return reduced_in_rows(site.facts.pattern, site.nodes, biases)


def computed_between(site: OverlapSite) -> fx.Node | None:
    """An op between gather and matmuls, or matmuls and reduction, that changes more than single elements (``row_wise``,
    ``passes.find_region``), if any."""
    nodes = site.nodes
    if isinstance(nodes, GatherNodes):
        return next((n for n in nodes.layouts if n is not nodes.collective.wait and n not in nodes.through), None)
    return next(iter((*nodes.region.reduced, *nodes.region.joined)), None) if nodes.region is not None else None


def chooses_at_run_time(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether the op can also tell from its rows how many tokens there are, to run the plain collective where they are
    few."""
    return loopable(site, kinds) and (isinstance(site.nodes, GatherNodes) or site.nodes.sharded.dim == 0)


def _gathers_rows(consumer: GatherConsumer, nodes: GatherNodes) -> bool:
    if consumer.role not in ("M", "N") or (consumer.role == "N" and consumer.matmul.bias is not None):
        return False
    rows_first = consumer.layout if consumer.role == "M" else consumer.layout.permute([1, 0])
    return nodes.raw.without_rank().same_elements(rows_first.without_rank()) and only_views(
        consumer.operand_node, nodes
    )


def _one_shape(consumers: list[GatherConsumer]) -> bool:
    """Whether all matmuls see the gathered tensor as one matrix."""
    shapes = [_shard(c) for c in consumers]
    return len({tools.dtype(c.operand_node) for c in consumers}) == 1 and all(
        same_size(a, b) for other in shapes[1:] for a, b in zip(shapes[0], other, strict=True)
    )


def _shard(consumer: GatherConsumer) -> list[Any]:
    """Rows and width of a shard, as the matmul sees them."""
    width = tools.shape(consumer.operand_node)[1 if consumer.role == "M" else 0]
    return [consumer.sharded.outer * consumer.sharded.chunk, width]


def only_views(node: fx.Node, nodes: GatherNodes) -> bool:
    """Whether ``node`` is the gathered tensor in another shape and order, with nothing computed on it."""
    return behind_views(node, nodes) is nodes.collective.wait


def behind_views(node: fx.Node, nodes: GatherNodes) -> fx.Node:
    """What ``node`` is in another shape and order: the gathered tensor, or what was computed on it."""
    while node is not nodes.collective.wait and (node in nodes.through or copies(node)):
        node = nodes.through.get(node, node.args[0])  # type: ignore[arg-type]
    return node


def reduced_in_rows(pattern: str, nodes: ReduceNodes, biases: Biases) -> bool:
    """Whether what each rank gets is rows of the matmuls' result (or columns, without a bias), in its own order of
    elements."""
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
    """The bias of each matmul, where ``terms`` together are the sum of the matmuls, each once, and of rows that are
    added to all rows alike: such a row is the bias of a plain matmul that has none. ``None`` where another
    op stands between (a factor, a scalar)."""
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
    """``biases_of`` what is reduced, of a site that is known to be such a sum."""
    biases = biases_of(nodes, nodes.computed)
    if biases is None:
        raise RuntimeError("the site was planned as a sum of matmuls, and is none any more")
    return biases


def is_row(node: fx.Node) -> bool:
    """Whether ``node`` is one row, as which it is added to any number of rows."""
    return bool(tools.shape(node)) and all(isinstance(s, int) and s == 1 for s in tools.shape(node)[:-1])


def _of_one_width(row: fx.Node, matmul: fx.Node) -> bool:
    return same_size(tools.shape(row)[-1], tools.shape(matmul)[-1]) and tools.dtype(row) == tools.dtype(matmul)


GatherCall = Callable[[fx.Node, list[fx.Node], list[fx.Node | None], bool], tuple[fx.Node, fx.Node | None, fx.Node]]
"""Writes the op: ``(shard, right operands, biases, whether the gathered tensor is read) -> (results, gathered tensor or
None, next token)``."""
ReduceCall = Callable[[list[fx.Node], list[fx.Node], list[fx.Node | None], str], fx.Node]
"""Writes the op: ``(left operands, right operands, biases, reduce_op) -> (result, next token)``, as one node."""


def rewrite_gather(emit: StepEmitter, nodes: GatherNodes, call: GatherCall) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """``(next token of the chain, what replaces which node)``, each in the shape and strides of what it replaces."""
    first = nodes.consumers[0]
    shard = emit.reshape(as_bits_of(emit, nodes.collective.input, tools.dtype(first.operand_node)), _shard(first))
    rhs = [c.matmul.rhs if c.role == "M" else transposed(emit, c.matmul.lhs) for c in nodes.consumers]
    results, gathered, chain = call(shard, rhs, [c.matmul.bias for c in nodes.consumers], gathered_used(nodes))
    replaced = {}
    for i, consumer in enumerate(nodes.consumers):
        result = rows_in_place(emit, emit.call(getitem, results, i), consumer.sharded, from_ranks=True)
        result = emit.cut_to_size(result, 0, consumer.sharded)
        replaced[consumer.matmul.node] = result if consumer.role == "M" else emit.contiguous(transposed(emit, result))
    return chain, replaced if gathered is None else replaced | gathered_as(emit, nodes, gathered)


def gathered_as(emit: StepEmitter, nodes: GatherNodes, gathered: fx.Node) -> dict[fx.Node, fx.Node]:
    """What ``gathered``, a matrix of all shards in the ranks' order, replaces."""
    whole = as_bits_of(
        emit, emit.reshape(gathered, tools.shape(nodes.collective.node)), tools.dtype(nodes.collective.node)
    )
    return {nodes.collective.wait: whole, nodes.collective.node: whole}


def rewrite_reduce(
    emit: StepEmitter, nodes: ReduceNodes, call: ReduceCall, biases: Biases
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """As ``rewrite_gather``; the result has the collective's shape and is contiguous."""
    columns = nodes.sharded.dim == 1
    pairs = [_operands(emit, m, columns) for m in nodes.leaves]

    def in_ranks_order(x: fx.Node) -> fx.Node:
        # (Of an output that is gathered each rank sends all of its rows.)
        gathers = nodes.collectives[0].kind == "all_gather"
        return x if gathers else rows_in_place(emit, x, nodes.sharded, from_ranks=False)

    def as_bias(x: fx.Node | None) -> fx.Node | None:
        return x if x is None else bias_row(emit, x) if is_row(x) else in_ranks_order(x)

    lhs = [in_ranks_order(emit.whole_chunks(a, 0, nodes.sharded)) for a, _ in pairs]
    out = call(lhs, [b for _, b in pairs], list(map(as_bias, biases)), nodes.collectives[0].reduce_op or "sum")
    result, chain = (emit.call(getitem, out, i) for i in range(2))
    result = emit.contiguous(transposed(emit, result)) if columns else result
    return chain, reduced(nodes, emit.reshape(result, tools.shape(nodes.collectives[0].node)))


def bias_row(emit: StepEmitter, row: fx.Node) -> fx.Node:
    """``row`` as an op takes a bias."""
    return emit.reshape(row, tools.shape(row)[-1:])


def reduced(nodes: ReduceNodes, result: fx.Node) -> dict[fx.Node, fx.Node]:
    """What ``result`` replaces."""
    replaced = {nodes.result: result}
    if len(nodes.collectives) == 1:
        replaced[nodes.collectives[0].node] = result
        replaced[nodes.collectives[0].wait] = result
    return replaced


def _operands(emit: StepEmitter, matmul: MatmulNode, columns: bool) -> tuple[fx.Node, fx.Node]:
    if columns:
        return transposed(emit, matmul.rhs), transposed(emit, matmul.lhs)
    return matmul.lhs, matmul.rhs


def as_bits_of(emit: StepEmitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``x``, or its bits as numbers of ``dtype`` (fp8 that travels as bytes)."""
    if tools.is_bitcast(x) and tools.dtype(x.args[0]) == dtype:  # type: ignore[arg-type]
        return x.args[0]  # type: ignore[return-value]
    return x if tools.dtype(x) == dtype else emit.call(aten.view.dtype, x, dtype)


def transposed(emit: StepEmitter, x: fx.Node) -> fx.Node:
    """``x`` with its two dims swapped (a view)."""
    return emit.call(aten.permute.default, x, [1, 0])


def rows_in_place(emit: StepEmitter, x: fx.Node, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``x [rows, columns]`` with its rows brought from the ranks' order into the tensor's, or the other way."""
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        return x
    rank, columns = Atom(emit.world_size, rank=True), Atom(tools.shape(x)[1])
    by_rank = Layout(((rank, *sharded.before, *sharded.after), (columns,)))
    in_place = Layout(((*sharded.before, rank, *sharded.after), (columns,)))
    return emit.convert(x, by_rank, in_place) if from_ranks else emit.convert(x, in_place, by_rank)

# SPDX-License-Identifier: Apache-2.0
"""``SentRows`` and ``ReceivedRows``: an all-to-all of equal slices and its matmuls, written as one op
(``one_op.exchange_ops``).

Matmuls may contract the dim that the ranks exchange (the output projection of Ulysses attention). Then the op has the
prefix ``joined_``: it joins the slices along the contracted dim.
"""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.exchanged_rows import arranged
from overlap_inductor.lowerings.exchanged_rows import given
from overlap_inductor.lowerings.exchanged_rows import sent_operands
from overlap_inductor.lowerings.exchanged_rows import sent_rows
from overlap_inductor.lowerings.one_op.gather_rows import GatherRows
from overlap_inductor.lowerings.one_op.gather_rows import placed
from overlap_inductor.lowerings.one_op.gather_rows import right_operands
from overlap_inductor.lowerings.one_op.gather_rows import shard_shape
from overlap_inductor.lowerings.one_op.reduce_rows import ReduceRows
from overlap_inductor.lowerings.one_op.reduce_rows import summed
from overlap_inductor.lowerings.reduced_rows import biases_of
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import Op
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter


class SentRows(ReduceRows):
    """See ``form.RowsForm``. A slice consists of rows of the matmul's result, or of columns."""

    turns = False

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, SentNodes)
        biases = biases_of(nodes, nodes.computed)
        if nodes.row_wise or biases is None or nodes.sharded.short or nodes.role not in ("M", "N"):
            return False
        return all(b is None or is_row(b) and (nodes.role == "M" or _has_columns_of(nodes, b)) for b in biases)

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        return next(iter(nodes_of(site, SentNodes).row_wise), None)

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return True

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        nodes, columns = nodes_of(site, SentNodes), int(right.shape[1])
        return int(left.shape[1]), columns // site.facts.collective.world_size if nodes.role == "N" else columns

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        if len(site.matmuls) == 1:
            return None
        return f"{len(site.matmuls)} matmuls are added before the all-to-all; a {noun} computes only one"

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, SentNodes)
        (left,), (right,), (bias,) = sent_operands(emit, nodes, summed(nodes))
        where = (nodes.role == "N", *own, emit.group_name, emit.site)
        out = emit.communicate(op(""), emit.chain, left, right, bias, *where)
        received, chain = (emit.call(getitem, out, i) for i in range(2))
        return chain, arranged(emit, nodes, received)


def _has_columns_of(nodes: SentNodes, bias: fx.Node) -> bool:
    """Whether ``bias`` can be cut as the matmul's columns are."""
    return same_size(tools.shape(bias)[-1], nodes.shape[1])


class ReceivedRows(GatherRows):
    """See ``form.RowsForm``. What is sent has a slice of rows for each rank."""

    def served(self, site: OverlapSite) -> OverlapSite:
        nodes, rows = nodes_of(site, ReceivedNodes), super().served(site)
        able = [c for c in nodes.consumers if c.matmul.kind in PLAIN and _joins(c, nodes)]
        able = [c for c in able if same_size(tools.shape(c.matmul.lhs)[0], tools.shape(able[0].matmul.lhs)[0])]
        if rows is not site or super().loopable(site) or not 0 < len(able) < len(nodes.consumers):
            return rows
        return replace(site, nodes=replace(nodes, consumers=able))

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReceivedNodes)
        # (A program may send bits of one dtype as another dtype. Such a site is left to the ring.)
        read = {tools.dtype(c.operand_node) for c in nodes.consumers}
        joins = all(_joins(c, nodes) for c in nodes.consumers)
        return read == {tools.dtype(nodes.source)} and (joins or super().loopable(site))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """The rows of an operand whose columns are exchanged are not the site's tokens (``SiteNodes.tokens``)."""
        return not _contracted(site)

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        inner, columns = super().slice_sizes(site, left, right)
        return inner // site.facts.collective.world_size if _contracted(site) else inner, columns

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ReceivedNodes)
        if _contracted(site):
            return _write_joined(emit, nodes, op("joined_"), own)
        rows, width = shard_shape(nodes.consumers[0])
        sent = emit.reshape(sent_rows(emit, nodes), [emit.world_size * rows, width])
        rhs, biases = right_operands(emit, nodes), [c.matmul.bias for c in nodes.consumers]
        used = nodes.hands_out_gathered()
        out = emit.communicate(op(""), emit.chain, sent, rhs, biases, used, *own, emit.group_name, emit.site)
        results, chain = (emit.call(getitem, out, i) for i in range(2))
        received = emit.call(getitem, results, len(rhs)) if used else None
        replaced = {
            c.matmul.node: placed(emit, c, emit.call(getitem, results, i)) for i, c in enumerate(nodes.consumers)
        }
        if received is None:
            return chain, replaced
        whole = given(emit, nodes, received)
        return chain, replaced | {nodes.collective.wait: whole, nodes.collective.node: whole}


def _contracted(site: OverlapSite) -> bool:
    return set(site.nodes.roles) == {"K"}


def _joins(consumer: GatherConsumer, nodes: ReceivedNodes) -> bool:
    """Whether the matmul's left operand has the slices side by side, each in the order in which it is sent, and the
    matmul's bias is a vector."""
    bias = consumer.matmul.bias
    return (
        consumer.role == "K"
        and consumer.operand == "lhs"
        and not consumer.sharded.short
        and (bias is None or len(tools.shape(bias)) == 1)
        and nodes.raw.without_rank().same_elements(consumer.layout.without_rank())
        and nodes.only_views(consumer.operand_node)
    )


def _write_joined(
    emit: StepEmitter, nodes: ReceivedNodes, op: Any, own: tuple[Any, ...]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """``RowsForm.write`` for matmuls that contract the exchanged dim."""
    first = nodes.consumers[0]
    rows, sharded = tools.shape(first.operand_node)[0], first.sharded
    sent = emit.reshape(sent_rows(emit, nodes), [emit.world_size * rows, sharded.outer * sharded.chunk])
    rhs = [rows_in_place(emit, c.matmul.rhs, c.sharded, from_ranks=False) for c in nodes.consumers]
    biases, used = [c.matmul.bias for c in nodes.consumers], nodes.hands_out_gathered()
    out = emit.communicate(op, emit.chain, sent, rhs, biases, used, *own, emit.group_name, emit.site)
    results, chain = (emit.call(getitem, out, i) for i in range(2))
    replaced = {c.matmul.node: emit.call(getitem, results, i) for i, c in enumerate(nodes.consumers)}
    if not used:
        return chain, replaced
    rank = next(a for a in nodes.given.flat() if a.rank)
    operand, columns = emit.call(getitem, results, len(rhs)), (rank, *sharded.before, *sharded.after)
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        # (Other matmuls then read the operand in place, e.g. that of a weight's gradient.)
        replaced |= {c.operand_node: operand for c in nodes.consumers if c.operand_node is not nodes.collective.wait}
    layout = Layout((first.layout.refined().dims[0], columns))
    whole = emit.reshape(emit.convert(operand, layout, nodes.given), tools.shape(nodes.collective.wait))
    whole = emit.contiguous(whole)
    return chain, replaced | {nodes.collective.wait: whole, nodes.collective.node: whole}

# SPDX-License-Identifier: Apache-2.0
"""``SentRows`` and ``ReceivedRows``: an all-to-all of equal slices and its matmuls, written as one op
(``one_op.exchange_ops``).

A matmul may contract the dim that the ranks exchange (the output projection of Ulysses attention). Its result is a sum
over the slices. A Triton kernel keeps the sum in registers, so a schedule with such a kernel computes this matmul by an
op of its own. With a vendor matmul for each slice, the sum would be rounded after each slice. If the sum were kept in
fp32, each slice would read and write it in memory, and this takes longer than the transfer.
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
from overlap_inductor.lowerings.one_op.gather_rows import one_bias_row
from overlap_inductor.lowerings.one_op.gather_rows import placed
from overlap_inductor.lowerings.one_op.gather_rows import right_operands
from overlap_inductor.lowerings.one_op.gather_rows import shard_shape
from overlap_inductor.lowerings.one_op.reduce_rows import ReduceRows
from overlap_inductor.lowerings.one_op.reduce_rows import summed
from overlap_inductor.lowerings.reduced_rows import biases_of
from overlap_inductor.lowerings.rows import CONTRACTION
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import Op
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.gather_nodes import GatherConsumer
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
        if biases is None or nodes.sharded.short or nodes.role not in ("M", "N"):
            return False
        return all(b is None or is_row(b) and (nodes.role == "M" or _has_columns_of(nodes, b)) for b in biases)

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
    """See ``form.RowsForm``. The tensor that is sent has a slice of rows for each rank."""

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReceivedNodes)
        # (A program may send bits of one dtype as another dtype. Such a site is left to the ring.)
        read = {tools.dtype(c.operand_node) for c in nodes.consumers}
        return read == {tools.dtype(nodes.source)} and (super().loopable(site) or _contraction(site) is not None)

    def served(self, site: OverlapSite) -> OverlapSite:
        """See ``form.RowsForm``. If no matmul has the exchanged dim among its rows or columns, the site keeps only the
        first matmul that contracts this dim."""
        rows = super().served(site)
        if rows is not site or super().loopable(site):
            return rows
        nodes = nodes_of(site, ReceivedNodes)
        contracted = next((c for c in nodes.consumers if _contracts(c, nodes)), None)
        if contracted is None or len(nodes.consumers) == 1:
            return site
        return replace(site, nodes=replace(nodes, consumers=[contracted]))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return _contraction(site) is None

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        ranks = site.facts.collective.world_size if _contraction(site) is not None else 1
        return int(left.shape[1]) // ranks, int(right.shape[1])

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        if (consumer := _contraction(site)) is None:
            return None
        if not contracts:
            return CONTRACTION
        inner = consumer.sharded.outer * consumer.sharded.chunk
        if isinstance(inner, int) and inner % contracts == 0:
            return None
        return (
            f"each rank sends {inner} of the elements that are contracted; a {noun} expects a multiple of {contracts}"
        )

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ReceivedNodes)
        if (consumer := _contraction(site)) is not None:
            return _write_contraction(emit, nodes, consumer, op, own)
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


def _contracts(consumer: GatherConsumer, nodes: ReceivedNodes) -> bool:
    """Whether the matmul contracts the exchanged dim of its left operand, and an op can compute the matmul."""
    return (
        (consumer.role, consumer.operand) == ("K", "lhs")
        and consumer.matmul.kind in PLAIN
        and one_bias_row(consumer.matmul)
        and nodes.raw.without_rank().same_elements(consumer.layout.without_rank())
        and nodes.only_views(consumer.operand_node)
    )


def _contraction(site: OverlapSite) -> GatherConsumer | None:
    """The site's only matmul, if it contracts the exchanged dim and an op can compute it. Otherwise ``None``."""
    nodes = nodes_of(site, ReceivedNodes)
    (first, *others) = nodes.consumers
    return first if not others and _contracts(first, nodes) else None


def _write_contraction(
    emit: StepEmitter, nodes: ReceivedNodes, consumer: GatherConsumer, op: Op, own: tuple[Any, ...]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """As ``ReceivedRows.write``. The rows of the right operand are brought into the ranks' order."""
    matmul, sharded = consumer.matmul, consumer.sharded
    rows, width = tools.shape(matmul.lhs)[0], sharded.outer * sharded.chunk
    sent = emit.reshape(sent_rows(emit, nodes), [emit.world_size * rows, width])
    rhs, used = rows_in_place(emit, matmul.rhs, sharded, from_ranks=False), nodes.hands_out_gathered()
    where = (used, *own, emit.group_name, emit.site)
    out = emit.communicate(op("contracted_"), emit.chain, sent, rhs, matmul.bias, *where)
    results, chain = (emit.call(getitem, out, i) for i in range(2))
    received = emit.call(getitem, results, 1) if used else None
    replaced = {matmul.node: emit.call(getitem, results, 0)}
    if received is None:
        return chain, replaced
    whole = given(emit, nodes, received)
    return chain, replaced | {nodes.collective.wait: whole, nodes.collective.node: whole}

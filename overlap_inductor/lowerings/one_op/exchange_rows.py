# SPDX-License-Identifier: Apache-2.0
"""``SentRows`` and ``ReceivedRows``: an all-to-all of equal slices and its matmuls, written as one op
(``one_op.exchange_ops``).

Matmuls may contract the exchanged dim, as the output projection of Ulysses attention does. Then the op's name has
``contracted_`` before the pattern, and the left operand has the slices of all ranks side by side. If each
slice had a vendor's matmul of its own, the sum would be rounded after each slice, or kept in memory in fp32. Instead:

- In schedule ``fused``, a Triton kernel adds up the products of the slices in registers
  (``lowerings.fused.contraction``).
- In schedule ``chunked``, a vendor's matmul reads a band of rows of all slices
  (``lowerings.chunked.contracted_launch``).
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
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter


class SentRows(ReduceRows):
    """See ``form.RowsForm``. A slice consists of rows or of columns of the product."""

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
    """Whether ``bias`` has an element for each column of the result, so that both can be cut alike."""
    return same_size(tools.shape(bias)[-1], nodes.shape[1])


class ReceivedRows(GatherRows):
    """See ``form.RowsForm``."""

    def served(self, site: OverlapSite) -> OverlapSite:
        """See ``form.served``."""
        nodes, rows = nodes_of(site, ReceivedNodes), super().served(site)
        if rows is not site or super().loopable(site):
            return rows
        able = [c for c in nodes.consumers if _contracts(c, nodes)]
        able = [c for c in able if same_size(tools.shape(c.operand_node)[0], tools.shape(able[0].operand_node)[0])]
        return replace(site, nodes=replace(nodes, consumers=able)) if 0 < len(able) < len(nodes.consumers) else site

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReceivedNodes)
        # A program may send the bits of one dtype as another dtype. The ring serves such a site, but this op does not.
        read = {tools.dtype(c.operand_node) for c in nodes.consumers}
        return read == {tools.dtype(nodes.source)} and (super().loopable(site) or _all_contract(nodes))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """False if the matmuls contract the exchanged dim: their operand's rows are not the site's tokens
        (``SiteNodes.tokens``)."""
        return not _all_contract(nodes_of(site, ReceivedNodes))

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        inner, columns = super().slice_sizes(site, left, right)
        contracted = _all_contract(nodes_of(site, ReceivedNodes))
        return inner // site.facts.collective.world_size if contracted else inner, columns

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        nodes = nodes_of(site, ReceivedNodes)
        if set(nodes.roles) != {"K"}:
            return None
        if not contracts:
            return CONTRACTION
        if not _all_contract(nodes):
            return (
                f"a matmul contracts the exchanged dim; a {noun} expects the ranks' slices side by side in its left"
                " operand, and a vector as its bias"
            )
        inner = _slice_width(nodes.consumers[0])
        if isinstance(inner, int) and inner % contracts == 0:
            return None
        return (
            f"each rank's slice of the contracted dim has {inner} elements; a {noun} expects a multiple of {contracts}"
        )

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ReceivedNodes)
        if _all_contract(nodes):
            return _write_contracted(emit, nodes, op, own)
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
    """Whether the matmul contracts the exchanged dim of its left operand, and an op can compute it. The operand must
    have the slices side by side, and each slice's elements in the order in which they are sent."""
    return (
        (consumer.role, consumer.operand) == ("K", "lhs")
        and consumer.matmul.kind in PLAIN
        and one_bias_row(consumer.matmul)
        and not consumer.sharded.short
        and nodes.raw.without_rank().same_elements(consumer.layout.without_rank())
        and nodes.only_views(consumer.operand_node)
    )


def _all_contract(nodes: ReceivedNodes) -> bool:
    return all(_contracts(c, nodes) for c in nodes.consumers)


def _slice_width(consumer: GatherConsumer) -> Any:
    """The number of elements of the contracted dim in each rank's slice."""
    return consumer.sharded.outer * consumer.sharded.chunk


def _write_contracted(
    emit: StepEmitter, nodes: ReceivedNodes, op: Op, own: tuple[Any, ...]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """``RowsForm.write`` for matmuls that contract the exchanged dim. Brings the right operands' rows into the ranks'
    order."""
    first = nodes.consumers[0]
    rows, width = tools.shape(first.operand_node)[0], _slice_width(first)
    sent = emit.reshape(sent_rows(emit, nodes), [emit.world_size * rows, width])
    rhs = [rows_in_place(emit, c.matmul.rhs, c.sharded, from_ranks=False) for c in nodes.consumers]
    biases, used = [c.matmul.bias for c in nodes.consumers], nodes.hands_out_gathered()
    where = (used, *own, emit.group_name, emit.site)
    out = emit.communicate(op("contracted_"), emit.chain, sent, rhs, biases, *where)
    results, chain = (emit.call(getitem, out, i) for i in range(2))
    replaced = {c.matmul.node: emit.call(getitem, results, i) for i, c in enumerate(nodes.consumers)}
    if not used:
        return chain, replaced
    operand = emit.call(getitem, results, len(rhs))
    # Other matmuls, e.g. of a weight's gradient, then read the operand without a copy.
    replaced |= {c.operand_node: operand for c in nodes.consumers if _is_operand(c, nodes)}
    whole = _given_from_operand(emit, nodes, operand)
    return chain, replaced | {nodes.collective.wait: whole, nodes.collective.node: whole}


def _is_operand(consumer: GatherConsumer, nodes: ReceivedNodes) -> bool:
    """Whether the received tensor that the op returns can take the place of the matmul's left operand."""
    node, outer = consumer.operand_node, consumer.sharded.outer
    in_ranks_order = isinstance(outer, int) and outer == 1
    return in_ranks_order and node is not nodes.collective.wait and tools.value(node).is_contiguous()


def _given_from_operand(emit: StepEmitter, nodes: ReceivedNodes, operand: fx.Node) -> fx.Node:
    """The collective's result, for its readers besides the site's matmuls. ``operand``: the left operand that the op
    returns."""
    rank, first = next(a for a in nodes.given.flat() if a.rank), nodes.consumers[0]
    columns = (rank, *first.sharded.before, *first.sharded.after)
    layout = Layout((first.layout.refined().dims[0], columns))
    whole = emit.reshape(emit.convert(operand, layout, nodes.given), tools.shape(nodes.collective.wait))
    return emit.contiguous(whole)

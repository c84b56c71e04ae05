# SPDX-License-Identifier: Apache-2.0
"""Lay out what an all-to-all of equal slices sends and receives, for all schedules that replace it."""

from __future__ import annotations

from torch import fx

from overlap_inductor.lowerings.reduced_rows import Biases
from overlap_inductor.lowerings.rows import bias_row
from overlap_inductor.lowerings.rows import columns_in_place
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.step_emitter import StepEmitter


def sent_operands(emit: StepEmitter, nodes: SentNodes, biases: Biases) -> tuple[list[fx.Node], list[fx.Node], Biases]:
    """``(left operands, right operands, biases)`` of the matmuls before an all-to-all. In the product, the rows (or
    columns) for rank 0 come first, then those for rank 1, and so on. A bias of one row becomes a vector."""
    columns, sharded = nodes.sharded.dim == 1, nodes.sharded
    in_ranks_order = columns_in_place if columns else rows_in_place

    def ordered(x: fx.Node) -> fx.Node:
        return in_ranks_order(emit, x, sharded, from_ranks=False)

    def as_bias(bias: fx.Node | None) -> fx.Node | None:
        if bias is None or not is_row(bias):
            return None if bias is None else ordered(bias)
        row = bias_row(emit, bias)
        return emit.reshape(ordered(emit.reshape(row, [1, *tools.shape(row)])), tools.shape(row)) if columns else row

    lhs = [m.lhs if columns else ordered(m.lhs) for m in nodes.leaves]
    rhs = [ordered(m.rhs) if columns else m.rhs for m in nodes.leaves]
    return lhs, rhs, list(map(as_bias, biases))


def arranged(emit: StepEmitter, nodes: SentNodes, buffer: fx.Node) -> Replaced:
    """The replacements of the collective and its wait. ``buffer``: what was received, in the layout ``nodes.wire``."""
    (collective,) = nodes.collectives
    result = emit.convert(emit.reshape(buffer, nodes.wire.shape()), nodes.wire, nodes.received)
    result = emit.contiguous(emit.reshape(result, tools.shape(collective.wait)))
    return {collective.wait: result, collective.node: result}


def sent_rows(emit: StepEmitter, nodes: ReceivedNodes) -> fx.Node:
    """What is sent, as a contiguous tensor with the layout ``nodes.raw``: one slice for each rank."""
    return emit.contiguous(emit.convert(nodes.source, nodes.source_layout, nodes.raw))


def given(emit: StepEmitter, nodes: ReceivedNodes, buffer: fx.Node) -> fx.Node:
    """The collective's result, for its readers besides the site's matmuls. ``buffer``: what was received."""
    result = emit.convert(emit.reshape(buffer, nodes.raw.shape()), nodes.raw, nodes.given)
    return emit.contiguous(emit.reshape(result, tools.shape(nodes.collective.wait)))

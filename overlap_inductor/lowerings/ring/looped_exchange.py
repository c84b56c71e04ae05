# SPDX-License-Identifier: Apache-2.0
"""Write all-to-alls as looping ops: decide which sites an op can compute, and lay out operands and results."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from overlap_inductor.lowerings.exchanged_rows import arranged
from overlap_inductor.lowerings.exchanged_rows import given
from overlap_inductor.lowerings.exchanged_rows import sent_operands
from overlap_inductor.lowerings.exchanged_rows import sent_rows
from overlap_inductor.lowerings.ring import looped_gather
from overlap_inductor.lowerings.ring import looped_reduce
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.step_emitter import StepEmitter

overlap = torch.ops.overlap_inductor


def computes_sent(nodes: SentNodes) -> bool:
    """Whether a looping op can compute ``matmul -> all-to-all``. The op needs plain matmuls (``PLAIN``), biases
    that are one row or have the result's shape, and slices of the same size."""
    biases = looped_reduce.biases_of(nodes)
    return (
        biases is not None
        and not nodes.sharded.short
        and all(m.kind in PLAIN for m in nodes.leaves)
        and all(map(looped_reduce.bias_fits, nodes.leaves, biases))
    )


def rewrite_sent(emit: StepEmitter, nodes: SentNodes, parts: int, floor: int) -> tuple[fx.Node, Replaced]:
    """Write ``matmul -> all-to-all`` as one op. Returns ``(next token of the chain, {old node: its replacement})``.
    Below ``floor`` tokens, the op runs the plain collective.

    Raises:
        RuntimeError: the op cannot compute the site.
    """
    biases = looped_reduce.planned_biases(nodes)
    columns, (lhs, rhs, biases) = nodes.sharded.dim == 1, sent_operands(emit, nodes, biases)
    dtype, where = tools.dtype(nodes.collectives[0].input), (emit.group_name, emit.site, *emit.transport)
    out = emit.communicate(
        overlap.matmul_all_to_all.default,
        emit.chain,
        lhs,
        rhs,
        biases,
        columns,
        nodes.lead,
        parts,
        floor,
        dtype,
        *where,
    )
    received, chain = (emit.call(getitem, out, i) for i in range(2))
    return chain, arranged(emit, nodes, received)


def computes_received(nodes: ReceivedNodes) -> bool:
    """Whether a looping op can compute ``all-to-all -> matmul``. The op needs matmuls that
    ``looped_gather.forms_of`` knows. Only views that keep the dtype may be between the all-to-all and the matmuls."""
    first = nodes.consumers[0].operand_node
    same = tools.dtype(first) == tools.dtype(nodes.collective.input)
    return same and nodes.only_views(first) and looped_gather.forms_of(nodes) is not None


def rewrite_received(emit: StepEmitter, nodes: ReceivedNodes, parts: int, floor: int) -> tuple[fx.Node, Replaced]:
    """Like ``rewrite_sent``, but writes ``all-to-all -> matmul`` as one op."""
    rows = sent_rows(emit, nodes)
    chain, replaced, received = looped_gather.write(
        emit,
        nodes,
        overlap.all_to_all_matmul.default,
        looped_gather.forms_of(nodes),
        lambda shape: emit.reshape(rows, [emit.world_size * shape[0], shape[1]]),
        (parts, floor),
    )
    result = given(emit, nodes, received)
    return chain, replaced | {nodes.collective.wait: result, nodes.collective.node: result}

# SPDX-License-Identifier: Apache-2.0
"""How the ring writes the two exchanges of experts and what is between them (``form.RingForm``)::

    x = wait_tensor(all_to_all(rows))[index]           ->  buffer, results, [x, ...] = all_to_all_experts(rows, ...)
    y = wait_tensor(all_to_all(index_put(experts(x))))     exchange_wait(buffer, [results]);  y = buffer

``buffer`` receives the returned rows. ``results`` are the rows that this rank is still sending back. ``[x, ...]`` are
those values between the exchanges that other nodes read too.

Work that does not need ``y``, for example gradients of weights, can run between ``all_to_all_experts`` and
``exchange_wait`` (``passes.delayed_matmuls``).
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from overlap_inductor.lowerings.ring import unrolled_exchange
from overlap_inductor.lowerings.ring.uneven_form import UnevenRing
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.dispatched_nodes import DispatchedNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter

overlap = torch.ops.overlap_inductor


class ExpertsRing(UnevenRing):
    """See ``form.RingForm``. Half of the rank's own rows are computed first, the rows of other ranks when they arrive,
    and then the other half. Each piece is sent back as soon as it is computed."""

    def loopable(self, site: OverlapSite) -> bool:
        return True

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, DispatchedNodes)
        operands, splits, handed_out = nodes.operands(), nodes.splits, nodes.handed_out()
        out = emit.communicate(
            overlap.all_to_all_experts.default,
            emit.chain,
            nodes.dispatch.input,
            nodes.index,
            nodes.ends,
            operands.rows,
            operands.whole,
            operands.program.to_text(),
            splits.sent,
            splits.received,
            parts,
            emit.group_name,
            emit.site,
            *emit.transport,
        )
        buffer, results, shared, chain = (emit.call(getitem, out, i) for i in range(4))
        replaced = {n: emit.call(getitem, shared, i) for i, n in enumerate(handed_out)}
        with emit.graph.inserting_before(nodes.combine.wait):
            hops = list(range((emit.world_size - 1) * parts))
            emit.communicate(
                overlap.exchange_wait.default,
                chain,
                buffer,
                [results],
                [1],
                hops,
                unrolled_exchange.ROUTE,
                emit.group_name,
                emit.site,
            )
        return chain, {nodes.combine.wait: buffer, nodes.combine.node: buffer, **replaced}

# SPDX-License-Identifier: Apache-2.0
"""How the ring writes all-to-alls whose parts have different sizes (``form.RingForm``): always as one looping op.

The op takes the numbers of rows as arguments, as the collective does. All ranks cut each part into ``sub_chunks``
pieces, whatever the part's size.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring import looped_gather
from overlap_inductor.lowerings.ring import looped_reduce
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring import unrolled_exchange
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import bias_row
from overlap_inductor.lowerings.rows import gathered_as
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.uneven_nodes import UnevenReceivedNodes
from overlap_inductor.sites.uneven_nodes import UnevenSentNodes

overlap = torch.ops.overlap_inductor


class UnevenRing:
    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        return {"sub_chunks": sub_chunks.most(site, config), "route": unrolled_exchange.ROUTE}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        nodes: SiteNodes = site.nodes
        return {nodes.roles[index]: site.facts.collective.world_size * parts}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int | None:
        return None

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """Never, because ranks have different token counts and could make different choices."""
        return False

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        raise RuntimeError(
            f"site {site.facts.id}: parts of different sizes were planned as unrolled steps; expected a looping op"
        )

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        return None


class UnevenSentRing(UnevenRing):
    """The ring for ``matmul -> all-to-all`` with parts of different sizes (``form.RingForm``). The parts for the other
    ranks are computed first. Each piece is sent as soon as it is computed."""

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, UnevenSentNodes)
        biases = looped_reduce.biases_of(nodes)
        plain = all(m.kind in PLAIN for m in nodes.leaves)
        return biases is not None and plain and all(map(looped_reduce.bias_fits, nodes.leaves, biases))

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, UnevenSentNodes)
        biases, splits, end = looped_reduce.planned_biases(nodes), nodes.splits, nodes.ends[0]
        out = emit.communicate(
            overlap.matmul_all_to_all_uneven.default,
            emit.chain,
            [m.lhs for m in nodes.leaves],
            [m.rhs for m in nodes.leaves],
            [bias_row(emit, b) if b is not None and is_row(b) else b for b in biases],
            splits.sent,
            splits.received,
            parts,
            tools.dtype(end.input),
            emit.group_name,
            emit.site,
            *emit.transport,
        )
        received, chain = (emit.call(getitem, out, i) for i in range(2))
        result = emit.reshape(received, tools.shape(end.wait))
        return chain, {end.wait: result, end.node: result}


class UnevenReceivedRing(UnevenRing):
    """The ring for ``all-to-all -> matmul`` with parts of different sizes (``form.RingForm``). This rank's own rows are
    multiplied first, the rows of other ranks when they arrive."""

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, UnevenReceivedNodes)
        same = tools.dtype(nodes.consumers[0].operand_node) == tools.dtype(nodes.collective.input)
        return same and looped_gather.forms_by_rows(nodes) is not None

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, UnevenReceivedNodes)
        source, splits = nodes.collective.input, nodes.splits
        chain, replaced, received = looped_gather.write(
            emit,
            nodes,
            overlap.all_to_all_uneven_matmul.default,
            looped_gather.forms_by_rows(nodes),
            lambda shape: emit.reshape(source, [tools.shape(source)[0], shape[1]]),
            (splits.sent, splits.received, parts),
        )
        return chain, replaced | gathered_as(emit, nodes, received)

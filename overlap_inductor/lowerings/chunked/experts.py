# SPDX-License-Identifier: Apache-2.0
"""Plans pattern ``all_to_all_experts`` for schedule ``chunked``, and writes a site of it as one op (``experts_ops``)::

    x = wait_tensor(all_to_all(rows))[index]           ->  y, [x, ...], token = chunked_all_to_all_experts(rows, ...)
    y = wait_tensor(all_to_all(index_put(experts(x))))

``[x, ...]`` are those values between the exchanges that other nodes read too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.chunked import experts_cost
from overlap_inductor.lowerings.one_op.schedule import OneOpSchedule
from overlap_inductor.lowerings.rows import overlap
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.runtime.arena import MESSAGES
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.dispatched_nodes import DispatchedNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import rounded
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.cuda_graphs import captured_by_inductor
from overlap_inductor.transports.messages import MOST_RANKS
from overlap_inductor.transports.messages import TRANSPORT
from overlap_inductor.transports.messages import needed

PATTERN = "all_to_all_experts"
ROOM = 1.25
"""A message has room for this many times the rows that a rank gets if all ranks get equally many. A larger part takes
several messages."""
WORDS = 16
"""Rows must be whole words of this many bytes."""


def _is_experts(site: OverlapSite) -> bool:
    return isinstance(site.nodes, DispatchedNodes)


class ExpertsSchedule(OneOpSchedule):
    """See ``SiteSchedule``. Writes experts and their two exchanges as one op, whose parts may have different sizes.
    Writes other sites as ``OneOpSchedule`` does."""

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        if not _is_experts(site):
            return super().why_not(site, config)
        if config.transport not in ("auto", TRANSPORT):
            return (
                f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, but schedule {self.name} can only use {TRANSPORT} for"
                f" {PATTERN}"
            )
        nodes = nodes_of(site, DispatchedNodes)
        source = tools.value(nodes.dispatch.input)
        if (reason := self.why_not_between(site.facts.collective.ranks, source.device)) is not None:
            return reason
        if site.facts.collective.world_size > MOST_RANKS:
            return f"the group has {site.facts.collective.world_size} ranks; messages can be sent among {MOST_RANKS}"
        if not has_example(site):
            return "the number of rows that the rank sends is only known when the graph runs, and messages need a size"
        if captured_by_inductor():
            return "the host tells the numbers of rows, but Inductor is set to run the graph as a CUDA graph"
        try:
            program = nodes.operands().program
        except ValueError as error:
            return str(error)
        rows = {nodes.dispatch.input: source.shape[1] * source.element_size(), nodes.put: _result_bytes(nodes)}
        for node, nbytes in rows.items():
            if nbytes % WORDS:
                return f"a row of {node.name} has {nbytes} bytes; expected a multiple of {WORDS}"
        unlike = next((h for h in program.handed_out if not getattr(torch, h.dtype).is_floating_point), None)
        return None if unlike is None else f"the experts also return a value of {unlike.dtype}; expected a float"

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return [PlanPiece(self.name, TRANSPORT)] if _is_experts(site) else super().forced(site, config)

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        if not _is_experts(site):
            return super().seconds(site, config)
        copied, reordered = _copied_bytes(site), _reordered_bytes(site)
        return experts_cost.seconds(sizes_at(site), machine_of(site, config), copied, reordered)

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        if not _is_experts(site):
            return super().where_it_pays(site, config, fewest)
        if not isinstance(site.nodes.tokens, int):
            return Reason(
                "dynamic_shape",
                "ranks have different numbers of rows, so the op of experts in chunks cannot choose by the number when"
                " the graph runs. Set OVERLAP_INDUCTOR_SCHEDULE=chunked to overlap the site at every number",
            )
        copied, reordered = _copied_bytes(site), _reordered_bytes(site)
        pays = experts_cost.pays(sizes_at(site), machine_of(site, config), copied, reordered)
        return self.forced(site, config) if pays else None

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        if not _is_experts(site):
            return super().request(site, piece)
        nodes, world_size = nodes_of(site, DispatchedNodes), site.facts.collective.world_size
        source = tools.value(nodes.dispatch.input)
        # Ranks may send different numbers of rows. Rounded numbers are usually equal.
        rows = -(-int(rounded(hint(nodes.tokens)) * ROOM) // world_size)
        nbytes = max(rows, 1) * max(source.shape[1] * source.element_size(), _result_bytes(nodes))
        return Request(site.facts.id, *needed(world_size, nbytes), MESSAGES)

    def exchange(self, site: OverlapSite, piece: PlanPiece) -> ExchangeTerms:
        return ExchangeTerms(piece.parameters, None, False) if _is_experts(site) else super().exchange(site, piece)

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        if not _is_experts(site):
            return super().rewrite(emit, site, parameters)
        nodes = nodes_of(site, DispatchedNodes)
        operands, splits, handed_out = nodes.operands(), nodes.splits, nodes.handed_out()
        out = emit.communicate(
            overlap.chunked_all_to_all_experts.default,
            emit.chain,
            nodes.dispatch.input,
            nodes.index,
            nodes.ends,
            operands.rows,
            operands.whole,
            operands.program.to_text(),
            splits.sent,
            splits.received,
            nodes.arrive_sorted,
            emit.group_name,
            emit.site,
        )
        returned, shared, chain = (emit.call(getitem, out, i) for i in range(3))
        replaced = {n: emit.call(getitem, shared, i) for i, n in enumerate(handed_out)}
        return chain, {nodes.combine.wait: returned, nodes.combine.node: returned, **replaced}


def _copied_bytes(site: OverlapSite) -> float:
    """Bytes of the values that the op copies into the order of the experts, or takes from it, if as many rows arrive as
    the rank sends."""
    nodes = nodes_of(site, DispatchedNodes)
    copied = (tools.value(n) for n in (*nodes.handed_out(), *nodes.operands().rows))
    return float(sum(rounded(hint(nodes.tokens)) * math.prod(t.shape[1:]) * t.element_size() for t in copied))


def _reordered_bytes(site: OverlapSite) -> float:
    """Bytes of the rows that the program permutes and the op does not, if as many rows arrive as the rank sends. 0
    unless rows arrive in the order of the experts."""
    nodes = nodes_of(site, DispatchedNodes)
    if not nodes.arrive_sorted:
        return 0.0
    source = tools.value(nodes.dispatch.input)
    row = source.shape[1] * source.element_size() + _result_bytes(nodes)
    return float(rounded(hint(nodes.tokens)) * row)


def _result_bytes(nodes: DispatchedNodes) -> int:
    """Bytes of a row that is returned."""
    result = tools.value(nodes.put)
    return int(result.shape[1]) * result.element_size()

# SPDX-License-Identifier: Apache-2.0
"""Plan and rewrite a site with schedule ``early_start``::

    y = attention(q, k, v)                          moved = all_to_all_single(block)
    moved = all_to_all_single(block)            ->  y = after(attention(q, k, v), moved)
    next = wait_tensor(moved)                       next = wait_tensor(moved)               # ordered after y

Op ``after`` returns the attention's result, and makes Inductor run the attention after the start of the exchange. The
collective stays the program's own. So a rank may overlap a site that another rank does not have. Torch's causal context
parallelism needs this, because a rank skips blocks that its queries do not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.early_start import cost
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.held_nodes import HeldNodes
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.target import on_gpu

overlap = torch.ops.overlap_inductor


class EarlyStart:
    """See ``SiteSchedule``. Cuts nothing and has no transport, so it runs on every backend and at every size."""

    name = "early_start"
    patterns = ("attention_all_to_all", "attention_all_gather")
    transports: tuple[str, ...] = ()
    noun = "early start"
    called = "with an early start"
    ops: tuple[str, ...] = ()
    called_by_others = False
    holds_workspace = False
    single_op = None

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> None:
        return None

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> None:
        return None

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return [PlanPiece(self.name, None, (0, None), {})]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        return cost.seconds(sizes_at(site), machine_of(site, config))

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        """The sizes of the example inputs decide whether the schedule pays, because one order of attention and
        exchange serves all token counts."""
        if not has_example(site):
            return Reason("dynamic_shape", "the sizes are only known when the graph runs, so there is no estimate")
        # On GPUs, this schedule was measured at one size only.
        measured = not on_gpu(tools.value(site.collectives[0].input).device)
        return self.forced(site, config) if cost.pays(sizes_at(site), machine_of(site, config), measured) else None

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Changes no decision: a rewrite adds too few nodes to matter for the graph's budget of nodes."""

    def request(self, site: OverlapSite, piece: PlanPiece) -> None:
        return None

    def anchor(self, site: DecidedSite) -> None:
        return None

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        return ExchangeTerms({}, None, False)

    def rewrite(self, emit: StepEmitter, site: DecidedSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        """See ``SiteSchedule``. Each exchange starts before the attention, and its wait stays in its place. No node is
        written at the insertion point of ``emit``."""
        nodes = nodes_of(site, HeldNodes)
        graph, attention = emit.graph, nodes.attention.node
        starts = []
        for exchange in nodes.exchanges:
            with graph.inserting_before(min(exchange.node, attention)):
                starts.append(emit.call(exchange.node.target, *exchange.node.args, **exchange.node.kwargs))
        results = nodes.attention.results()
        for result in sorted(results, reverse=True):
            attention.append(result)
        first = min(result for result in results if result.users)
        with graph.inserting_before(max(results).next):
            held = emit.call(getitem, attention, results[first])
            for start in starts:
                held = emit.call(overlap.after.default, held, start)
        replaced: Replaced = {first: held}
        for exchange, start in zip(nodes.exchanges, starts, strict=True):
            with graph.inserting_before(exchange.wait):
                wait = emit.call(exchange.wait.target, start)
            emit.order[wait] = {held}
            replaced |= {exchange.wait: wait, exchange.node: start}
        return emit.chain, replaced

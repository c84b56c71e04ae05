# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: a site becomes one op. The op's kernel also computes the pointwise ops that follow the results,
as an epilogue.

A site with a dynamic token count has no epilogue, because its calls of few tokens run as written. Such a call would run
the pointwise ops of an epilogue one by one. Outside the op, Inductor can fuse them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.lowerings.fused import cost
from overlap_inductor.lowerings.fused import parameters
from overlap_inductor.lowerings.fused.parameters import EXCHANGES
from overlap_inductor.lowerings.fused.parameters import GATHERS
from overlap_inductor.lowerings.fused.parameters import column_tiles
from overlap_inductor.lowerings.fused.parameters import in_one_launch
from overlap_inductor.lowerings.fused.parameters import parameters_of
from overlap_inductor.lowerings.fused.tables import PATTERN as TABLES
from overlap_inductor.lowerings.fused.tables import TableSchedule
from overlap_inductor.lowerings.fused.tails import GATHER
from overlap_inductor.lowerings.fused.tails import described
from overlap_inductor.lowerings.fused.tails import results_of
from overlap_inductor.lowerings.fused.tails import tails_of
from overlap_inductor.lowerings.one_op.form import served
from overlap_inductor.lowerings.one_op.schedule import operands
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.epilogue_program import to_text
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import rounded
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import symmetric


@dataclass(frozen=True)
class FusedSchedule(TableSchedule):
    """See ``SiteSchedule``. If a result has an epilogue, the plan has a parameter ``epilogue``: for each result,
    the epilogue's program as text, or an empty text."""

    def pieces(self, site: OverlapSite, config: OverlapConfig, min_rows: int) -> list[PlanPiece]:
        found = super().pieces(site, config, min_rows)
        tails = tails_of(served(site))
        if any(tails):
            found[0].parameters["epilogue"] = described(tails)
        return found

    def settings_for(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        settings = super().settings_for(site, config)
        if site.facts.pattern not in GATHERS:
            return settings
        # The number of slices in which a rank pushes its shard depends on the number of column tiles, and must be equal
        # on all ranks. Ranks may have different numbers of columns, but rounded numbers are usually equal.
        rights = [right for _, right in operands(served(site))]
        columns = [rounded(int(rights[i].shape[1])) for i in in_one_launch(rights)]
        return {**settings, "column_tiles": column_tiles(columns, parameters_of(json.dumps(settings), 1))}

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        if "epilogue" not in parameters:
            return super().rewrite(emit, site, parameters)
        site = served(site)
        # The tails are found again, because rewrites of earlier sites have put other nodes into the graph.
        tails = tails_of(site, parameters["epilogue"])
        if described(tails) != parameters["epilogue"]:
            raise RuntimeError(f"the epilogue was planned as {parameters['epilogue']} and is now {described(tails)}")
        extras = [emit.reshape(node, shape) for tail in tails if tail is not None for node, shape in tail.extras]
        text = to_text([None if tail is None else tail.epilogue for tail in tails])
        chain, replaced = self.written(
            emit, site, f"{site.facts.pattern}_epilogue", [], extras, text, parameters["settings"]
        )
        ends = {result: tail.end for result, tail in zip(results_of(site), tails, strict=True) if tail is not None}
        if site.facts.pattern != GATHER:
            # Only the tail's end gets a replacement. The nodes before it, the collective included, are then unused.
            replaced = {result: replaced[result] for result in ends}
        return chain, {
            ends.get(old, old): emit.reshape(new, tools.shape(ends.get(old, old))) for old, new in replaced.items()
        }


FUSED = FusedSchedule(
    name="fused",
    called="in a fused kernel",
    noun="fused kernel",
    patterns=("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", *EXCHANGES, TABLES),
    plan=parameters,
    parameters=parameters.FusedParameters,
    cost=cost.seconds,
    pays=cost.pays,
    reach=lambda ranks, device: symmetric.why_no_symmetric_memory(ranks, device),
    needed=parameters.needed,
    replays=True,
    called_by_others=True,
    contracts=parameters.CONTRACTED,
    ops=("overlap_inductor.lowerings.fused.ops", "overlap_inductor.lowerings.fused.table_ops"),
)

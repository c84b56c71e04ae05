"""Schedule ``fused`` for a site: one op, with the pointwise ops behind its results in its kernel's epilogue.

Not with a dynamic token count, where calls of few tokens run as they stood, and their pointwise ops one by one.
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
from overlap_inductor.lowerings.fused.parameters import column_tiles
from overlap_inductor.lowerings.fused.parameters import in_one_launch
from overlap_inductor.lowerings.fused.parameters import parameters_of
from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.lowerings.one_op.schedule import OneOpSchedule
from overlap_inductor.lowerings.one_op.schedule import operands
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.epilogue_program import to_text
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import rounded
from overlap_inductor.sites.sizes import tokens
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.tile_epilogue import MOST_EXTRAS
from overlap_inductor.sites.tile_epilogue import Tail
from overlap_inductor.sites.tile_epilogue import find_tail
from overlap_inductor.torch_compat import symmetric


@dataclass(frozen=True)
class FusedSchedule(OneOpSchedule):
    """See ``SiteSchedule``. Parameter ``epilogue``, if there is one: for each result its program, or an empty text."""

    def pieces(self, site: OverlapSite, config: OverlapConfig, min_rows: int) -> list[PlanPiece]:
        found = super().pieces(site, config, min_rows)
        tails = _tails(looping.served(site))
        if any(tails):
            found[0].parameters["epilogue"] = _described(tails)
        return found

    def settings_for(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        settings = super().settings_for(site, config)
        if not isinstance(site.nodes, GatherNodes):
            return settings
        # A shard is pushed in slices, whose number rests on the tiles of all weights. A rank may have more or less
        # columns of them than its peers.
        rights = [right for _, right in operands(looping.served(site))]
        columns = [rounded(int(rights[i].shape[1])) for i in in_one_launch(rights)]
        return {**settings, "column_tiles": column_tiles(columns, parameters_of(json.dumps(settings), 1))}

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        if "epilogue" not in parameters:
            return super().rewrite(emit, site, parameters)
        site = looping.served(site)
        # (Anew: sites before this one have put other nodes into the graph.)
        tails = _tails(site, parameters["epilogue"])
        if _described(tails) != parameters["epilogue"]:
            raise RuntimeError(f"the epilogue was planned as {parameters['epilogue']} and is now {_described(tails)}")
        extras = [emit.reshape(node, shape) for tail in tails if tail is not None for node, shape in tail.extras]
        text = to_text([None if tail is None else tail.epilogue for tail in tails])
        chain, replaced = self.written(
            emit, site, f"{site.facts.pattern}_epilogue", (), extras, text, parameters["settings"]
        )
        if isinstance(site.nodes, GatherNodes):
            ends = {
                c.matmul.node: tail.end for c, tail in zip(site.nodes.consumers, tails, strict=True) if tail is not None
            }
        else:
            ends = {site.nodes.result: tails[0].end}  # type: ignore[union-attr]
            replaced = {site.nodes.result: replaced[site.nodes.result]}
        return chain, {
            ends.get(old, old): emit.reshape(new, tools.shape(ends.get(old, old))) for old, new in replaced.items()
        }


def _described(tails: list[Tail | None]) -> list[str]:
    return ["" if tail is None else str(tail.epilogue) for tail in tails]


def _tails(site: OverlapSite, planned: list[str] | None = None) -> list[Tail | None]:
    """The tail of each result of the op that its kernel writes in the result's own order. ``planned``: what they were
    described as, if they were."""
    nodes = site.nodes
    if not isinstance(tokens(site), int):
        return []
    if not isinstance(nodes, GatherNodes):
        collective, sharded = nodes.collectives[0], nodes.sharded
        in_order = sharded.dim == 0 and _one_run(sharded)
        alone = len(nodes.collectives) == 1 and nodes.result is collective.wait
        return [
            (
                find_tail(nodes.result, collective.node, planned=planned[0] if planned else None)
                if in_order and alone
                else None
            )
        ]
    launched = in_one_launch([right for _, right in operands(site)])
    tails: list[Tail | None] = []
    room = MOST_EXTRAS
    for i, consumer in enumerate(nodes.consumers):
        fits = i in launched and consumer.role == "M" and _one_run(consumer.sharded) and (planned is None or planned[i])
        tail = (
            find_tail(consumer.matmul.node, nodes.collective.node, room, planned[i] if planned else None)
            if fits
            else None
        )
        room -= len(tail.extras) if tail is not None else 0
        tails.append(tail)
    return tails


def _one_run(sharded: ShardedDim) -> bool:
    """Whether a rank's rows lie one after the other, and none are missing."""
    return isinstance(sharded.outer, int) and sharded.outer == 1 and not sharded.short


FUSED = FusedSchedule(
    name="fused",
    transports=("sm_push", "copy_engine"),
    called="in a fused kernel",
    noun="fused kernel",
    patterns=("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    plan=parameters,
    cost=cost.seconds,
    pays=cost.pays,
    reach=lambda ranks, device: symmetric.why_no_symmetric_memory(ranks, device),
    needed=parameters.needed,
    replays=True,
    called_by_others=True,
    ops=("overlap_inductor.lowerings.fused.ops",),
)

# SPDX-License-Identifier: Apache-2.0
"""Decide which seams are written in bands, and write that into the decisions of their sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring.schedule import unrolled_nodes
from overlap_inductor.passes.sequence.seams import check
from overlap_inductor.passes.sequence.seams import cost
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import find
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.sizes import has_example


def join(sites: Sequence[DecidedSite], config: OverlapConfig, uncut: Collection[list[str]] = ()) -> list[Seam]:
    """The seams among ``sites`` that are written in bands. The plans of their sites get the parameter ``bands``, and
    estimates that are shorter by what the bands save. If the schedule is forced, bands need not pay, and the estimates
    may become longer.

    Bands add nodes. In graph order, a seam is written in bands if its nodes fit into the part of the graph's
    ``step_node_budget`` that the unrolled rings leave.

    Args:
        uncut: the ids of the two sites of each seam that is not to be cut, because writing it has failed."""
    rings = [s for s in sites if s.decision.moving.parameters.get("unrolled")]
    left = config.step_node_budget - sum(unrolled_nodes(s) or 0 for s in rings)
    joined = []
    for seam in find(sites):
        if [seam.scatter.facts.id, seam.gather.facts.id] in uncut:
            continue
        bands = check.bands_of(seam)
        if bands is None or not all(has_example(s) for s in (seam.scatter, seam.gather)):
            continue
        saved = cost.saved(seam, bands, config)
        if not saved.pays and config.schedule == "auto":
            continue
        added = added_nodes(seam, bands)
        if added > left:
            continue
        left -= added
        _cut(seam.scatter, bands, saved.scatter)
        _cut(seam.gather, bands, saved.gather)
        joined.append(seam)
    return joined


def added_nodes(seam: Seam, bands: int) -> int:
    """Estimated number of FX nodes that bands add. Each band but the first adds the nodes of the region, and slices of
    the other tensors that the region reads. It also adds the steps for a piece of this rank's rows.

    The region's number is rounded up to a multiple of 8, because an op may exist on one rank only."""
    inside = {seam.scattered, *seam.region}
    sliced = {i for n in seam.region for i in n.all_input_nodes if i not in inside}
    region = -(-(len(seam.region) + len(sliced)) // 8) * 8
    pieces = (seam.gather.facts.collective.world_size - 1) * bands + 1
    return (bands - 1) * (region + -(-(unrolled_nodes(seam.gather) or 0) // pieces)) + 2 * len(seam.joined)


def _cut(site: DecidedSite, bands: int, seconds: float) -> None:
    piece = site.decision.moving
    estimate = dict(piece.estimate_us)
    if piece.schedule in estimate:
        estimate[piece.schedule] = round(max(estimate[piece.schedule] - seconds * 1e6, estimate["matmul"]), 1)
    parameters = {**piece.parameters, "bands": bands}
    if site.facts.pattern == "all_gather_matmul":
        parameters["route"] = "broadcast"
    site.decision.plan = [dataclasses.replace(piece, parameters=parameters, estimate_us=estimate)]

# SPDX-License-Identifier: Apache-2.0
"""Decide which seams are written in bands, and write that into the decisions of their sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring.cost import fewest
from overlap_inductor.lowerings.ring.schedule import part_counts
from overlap_inductor.lowerings.ring.schedule import unrolled_nodes
from overlap_inductor.lowerings.ring.sub_chunks import by_estimate
from overlap_inductor.passes.sequence.seams import check
from overlap_inductor.passes.sequence.seams import cost
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import find
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.sizes import has_example


def join(sites: Sequence[DecidedSite], config: OverlapConfig, uncut: Collection[list[str]] = ()) -> list[Seam]:
    """Choose which seams among ``sites`` are written in bands, and return these seams. The plans of each chosen seam's
    two sites get the parameter ``bands`` and the estimated times in bands. Bands need not pay if estimates do
    not choose the ring's sub-chunks (``sub_chunks.by_estimate``).

    Each seam takes the smallest number of bands whose estimated time is close to the shortest. Bands add nodes, which
    must fit into what unrolled rings and earlier seams have left of ``step_node_budget``.

    Args:
        uncut: the ids of the two sites of each seam that gets no bands, because writing it in bands has failed.
    """
    rings = [s for s in sites if s.decision.moving.parameters.get("unrolled")]
    left = config.step_node_budget - sum(unrolled_nodes(s) or 0 for s in rings)
    joined = []
    for seam in find(sites):
        if [seam.scatter.facts.id, seam.gather.facts.id] in uncut:
            continue
        counts = [n for n in part_counts(seam.scatter, config) if n in part_counts(seam.gather, config)]
        legal = check.bands_of(seam, counts)
        if not legal or not all(has_example(s) for s in (seam.scatter, seam.gather)):
            continue
        estimated = by_estimate(seam.scatter, config)
        saved = {n: cost.saved(seam, n, config) for n in legal if added_nodes(seam, n) <= left}
        totals = {n: s.total for n, s in saved.items() if s.pays or not estimated}
        if not totals:
            continue
        bands = fewest(totals)
        left -= added_nodes(seam, bands)
        _cut(seam.scatter, bands, saved[bands].scatter)
        _cut(seam.gather, bands, saved[bands].gather)
        joined.append(seam)
    return joined


def added_nodes(seam: Seam, bands: int) -> int:
    """Estimated number of FX nodes that bands add. The seam's region is the nodes between its two sites. Added are:

    - for each band but the first: the nodes of the region, and slices of other tensors that the region reads;
    - for each band but the first: the gather's steps for a piece of this rank's own rows;
    - the sites' additional steps, if their own plans have fewer sub-chunks than ``bands``;
    - the nodes that join bands.

    An op of the region may exist on one rank only, and all ranks should decide alike. So the number of the region's
    nodes and slices is rounded up to a multiple of 8.
    """
    inside = {seam.scattered, *seam.region}
    sliced = {i for n in seam.region for i in n.all_input_nodes if i not in inside}
    region = -(-(len(seam.region) + len(sliced)) // 8) * 8
    pieces = (seam.gather.facts.collective.world_size - 1) * bands + 1
    cut = [(unrolled_nodes(s, bands) or 0, unrolled_nodes(s) or 0) for s in (seam.scatter, seam.gather)]
    steps = sum(new - old for new, old in cut)
    return steps + (bands - 1) * (region + -(-cut[1][0] // pieces)) + 2 * len(seam.joined)


def _cut(site: DecidedSite, bands: int, seconds: float) -> None:
    piece = site.decision.moving
    estimate = dict(piece.estimate_us)
    if piece.schedule in estimate:
        estimate[piece.schedule] = round(max(estimate[piece.schedule] - seconds * 1e6, estimate["matmul"]), 1)
    parameters = {**piece.parameters, "sub_chunks": bands, "bands": bands}
    if site.facts.pattern == "all_gather_matmul":
        parameters["route"] = "broadcast"
    site.decision.plan = [dataclasses.replace(piece, parameters=parameters, estimate_us=estimate)]

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

    In bands, a shard of either site has one sub-chunk for each band. If several numbers of bands are possible, the seam
    takes the smallest number whose estimated time is close to the shortest estimated time. This number may exceed the
    number of sub-chunks in a site's own plan. Alone, a site whose matmul is short needs few sub-chunks, but its seam
    may need more.

    Bands add nodes. Unrolled rings use a part of the graph's ``step_node_budget``. The seams share the rest, in graph
    order: a seam is written in bands if the nodes that its bands add fit into what is left.

    Args:
        uncut: the ids of the two sites of each seam that is not to be cut, because writing it has failed."""
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
        saved = {n: cost.saved(seam, n, config) for n in legal if added_nodes(seam, n) <= left}
        totals = {n: s.total for n, s in saved.items() if s.pays or config.schedule != "auto"}
        if not totals:
            continue
        bands = fewest(totals)
        left -= added_nodes(seam, bands)
        _cut(seam.scatter, bands, saved[bands].scatter)
        _cut(seam.gather, bands, saved[bands].gather)
        joined.append(seam)
    return joined


def added_nodes(seam: Seam, bands: int) -> int:
    """Estimated number of FX nodes that bands add. Each band but the first adds the nodes of the region, and slices of
    the other tensors that the region reads. It also makes one more piece of this rank's own rows, and so adds the
    gather's steps for that piece. If a site's own plan has fewer sub-chunks than bands, the steps of the additional
    sub-chunks count, too.

    All ranks should make the same decision, although an op of the region may exist on one rank only. So the number of
    the region's nodes and slices is rounded up to a multiple of 8."""
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

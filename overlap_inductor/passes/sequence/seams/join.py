# SPDX-License-Identifier: Apache-2.0
"""Decide which seams are written in bands and which of these form chains. Write that into the decisions of their
sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring.cost import fewest
from overlap_inductor.lowerings.ring.schedule import part_counts
from overlap_inductor.lowerings.ring.schedule import unrolled_nodes
from overlap_inductor.lowerings.ring.sub_chunks import by_estimate
from overlap_inductor.passes.sequence.seams import chains
from overlap_inductor.passes.sequence.seams import check
from overlap_inductor.passes.sequence.seams import cost
from overlap_inductor.passes.sequence.seams.chains import Chain
from overlap_inductor.passes.sequence.seams.cost import Saved
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import find
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.sizes import has_example


@dataclass(frozen=True)
class Joined:
    """``seams``: those written in bands, in graph order. ``chains``: the chains among them."""

    seams: Sequence[Seam] = ()
    chains: Sequence[Chain] = ()


def join(sites: Sequence[DecidedSite], config: OverlapConfig, uncut: Collection[list[str]] = ()) -> Joined:
    """Choose which seams among ``sites`` are written in bands. The plans of each chosen seam's two sites get the
    parameter ``bands`` and the estimated times in bands. Bands need not pay if estimates do not choose the ring's
    sub-chunks (``sub_chunks.by_estimate``).

    Then choose chains among these seams (``chains``). If estimates choose the bands, a chain may have another number of
    bands than its seams alone. It is written if its estimate is shorter than the sum of theirs
    (``cost.CHAIN_MARGIN``). The plan of the chain's second scatter gets the parameter ``chained``.

    Each seam takes the smallest number of bands whose estimated time is close to the shortest. Bands add nodes, which
    must fit into what unrolled rings and earlier seams have left of ``step_node_budget``.

    Args:
        uncut: the ids of the two sites of each seam that gets no bands, because writing it in bands has failed. Also
            the ids of the four sites of each chain that could not be written.
    """
    rings = [s for s in sites if s.decision.moving.parameters.get("unrolled")]
    left = config.step_node_budget - sum(unrolled_nodes(s) or 0 for s in rings)
    options = [o for s in find(sites) if ids(s) not in uncut and (o := _option(s, config)) is not None]
    found = [c for c in chains.find(o.seam for o in options) if ids(c) not in uncut]
    joined, written = set[str](), list[Chain]()
    for option in options:
        seam = option.seam
        chain = next((c for c in found if c.first is seam), None)
        second = next((o for o in options if chain is not None and o.seam is chain.second), None)
        if chain and second and (bands := _chain_bands(chain, option, second, config, left)):
            both = (option.saved[bands], second.saved[bands])
            sites_saved = cost.saved_by_chain(chain, both, bands, config).sites
            for one, saved in ((seam, sites_saved[:2]), (chain.second, sites_saved[2:])):
                left -= added_nodes(one, bands)
                _cut(one, bands, saved)
            _set(chain.second.scatter, chained=True)
            joined.update(ids(chain))
            written.append(chain)
        elif seam.scatter.facts.id not in joined and (bands := option.bands(left)):
            left -= added_nodes(seam, bands)
            _cut(seam, bands, option.saved[bands].sites)
            joined.update(ids(seam))
    return Joined([o.seam for o in options if o.seam.scatter.facts.id in joined], written)


@dataclass(frozen=True)
class _Option:
    """``saved``: for each number of bands that is legal, the estimates. ``estimated``: whether the bands must pay."""

    seam: Seam
    saved: dict[int, Saved]
    estimated: bool

    def bands(self, left: int) -> int | None:
        """The number of bands if the seam is in no chain; ``None`` for no bands. ``left``: how many nodes may be
        added."""
        totals = {n: s.total for n, s in self.saved.items() if s.pays or not self.estimated}
        totals = {n: total for n, total in totals.items() if added_nodes(self.seam, n) <= left}
        return fewest(totals) if totals else None

    def seconds(self, left: int) -> float:
        """Estimated seconds of the seam if it is in no chain."""
        bands = self.bands(left)
        return self.saved[bands].total if bands else next(iter(self.saved.values())).turn


def _option(seam: Seam, config: OverlapConfig) -> _Option | None:
    counts = [n for n in part_counts(seam.scatter, config) if n in part_counts(seam.gather, config)]
    legal = check.bands_of(seam, counts)
    if not legal or not all(has_example(s) for s in (seam.scatter, seam.gather)):
        return None
    return _Option(seam, {n: cost.saved(seam, n, config) for n in legal}, by_estimate(seam.scatter, config))


def _chain_bands(chain: Chain, first: _Option, second: _Option, config: OverlapConfig, left: int) -> int | None:
    """The number of bands of a chain; ``None`` if its seams are better written alone. If the bands need not pay, the
    two seams form a chain if each takes the same number alone."""
    counts = [n for n in first.saved if n in second.saved and chains.groups_agree(chain, n)]
    counts = [n for n in counts if added_nodes(chain.first, n) + added_nodes(chain.second, n) <= left]
    if not first.estimated:
        bands = first.bands(left)
        return bands if bands in counts and bands == second.bands(left) else None
    bands = first.bands(left)
    rest = left - added_nodes(first.seam, bands) if bands else left
    alone = first.seconds(left) + second.seconds(rest)
    estimates = {n: cost.saved_by_chain(chain, (first.saved[n], second.saved[n]), n, config).total for n in counts}
    pays = {n: total for n, total in estimates.items() if alone > cost.CHAIN_MARGIN * total}
    return fewest(pays) if pays else None


def ids(of: Seam | Chain) -> list[str]:
    """The ids of the sites of a seam or chain."""
    seams = (of.first, of.second) if isinstance(of, Chain) else (of,)
    return [site.facts.id for seam in seams for site in (seam.scatter, seam.gather)]


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


def _cut(seam: Seam, bands: int, saved: Sequence[float]) -> None:
    for site, seconds in zip((seam.scatter, seam.gather), saved, strict=True):
        piece = site.decision.moving
        estimate = dict(piece.estimate_us)
        if piece.schedule in estimate:
            estimate[piece.schedule] = round(max(estimate[piece.schedule] - seconds * 1e6, estimate["matmul"]), 1)
        site.decision.plan = [dataclasses.replace(piece, estimate_us=estimate)]
        _set(site, sub_chunks=bands, bands=bands)
    _set(seam.gather, route="broadcast")


def _set(site: DecidedSite, **parameters: object) -> None:
    piece = site.decision.moving
    site.decision.plan = [dataclasses.replace(piece, parameters={**piece.parameters, **parameters})]

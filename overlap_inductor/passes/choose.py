# SPDX-License-Identifier: Apache-2.0
"""Choose the sites to overlap: find them, decide each, and find again if that overlaps more."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.passes import check as legality
from overlap_inductor.passes import fused_sums
from overlap_inductor.passes import host_time
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes import shared_matmuls
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite


class Choice(NamedTuple):
    """The result of one search of a graph.

    Attributes:
        found: the finder after its search.
        sites: all sites, with their decisions.
        chosen: the sites to overlap. Mode ``report`` only names them.
    """

    found: SiteFinder
    sites: list[DecidedSite]
    chosen: list[DecidedSite]


def find_and_choose(
    graph: fx.Graph,
    config: OverlapConfig,
    phase: str,
    refusal: str | None,
    failed: dict[str, Reason],
    by_example: bool = False,
) -> Choice:
    """Find and decide all sites.

    If one of the matmuls that a site sums belongs to another site, the summing site leaves the matmul to the other
    site. But sometimes the other site is not overlapped. So these two changes are tried:

    - If the other site is not overlapped, the summing site takes the matmul.
    - If the rest of the sum is the matmul's bias, the matmul and the addition become two nodes (``fused_sums.unfold``).

    A change is kept if it overlaps more sites, or as many sites with more matmuls.

    Args:
        phase: inference, forward or backward.
        refusal: why the compile can hold no overlap ops, or ``None``.
        failed: ``{site id: why its rewrite failed}``.
        by_example: see ``host_time.limits``.
    """

    def chosen_without(idle: set[str]) -> Choice:
        found = SiteFinder(graph, phase, idle).run()
        host_bound = host_time.limits(found, config, by_example) if config.schedule == "auto" else {}
        return Choice(found, *choose(found.sites, config, refusal, failed, host_bound))

    def improved() -> Choice:
        best, idle = chosen_without(set()), set[str]()
        while not (more := _idle_owners(best)) <= idle:
            idle = idle | more
            other = chosen_without(idle)
            if _served(other) <= _served(best):
                break
            best = other
        return best

    best = improved()
    if not fused_sums.unfold(best.found.left):
        return best
    served, unfolded = _served(best), improved()
    if _served(unfolded) > served:
        return unfolded
    fused_sums.put_back(graph, unfolded_only=True)
    return improved()


def _idle_owners(choice: Choice) -> set[str]:
    """For each site that is not overlapped although another site left a matmul to it, the name of the site's first
    collective."""
    taken, left = {s.facts.id for s in choice.chosen}, choice.found.left
    return {
        s.collectives[0].node.name
        for s in choice.sites
        if s.facts.id not in taken and not left.isdisjoint(m.node for m in s.matmuls)
    }


def _served(choice: Choice) -> tuple[int, int]:
    """``(number of sites to overlap, number of their matmuls)``."""
    return len(choice.chosen), sum(len(s.matmuls) for s in choice.chosen)


def choose(
    sites: list[OverlapSite],
    config: OverlapConfig,
    refusal: str | None,
    failed: dict[str, Reason],
    host_bound: Mapping[fx.Node, host_time.HostLimit],
) -> tuple[list[DecidedSite], list[DecidedSite]]:
    """Decide every site. Returns ``(all sites with their decisions, the sites to overlap)``. ``host_bound``: the result
    of ``host_time.limits``.

    Sites that share a matmul are first decided each alone. Those that save less together leave the matmul to the
    others (``shared_matmuls``). Then all sites are decided in graph order, because accepted sites restrict later ones.
    """

    def decide(some: Sequence[OverlapSite], left: Mapping[str, Reason]) -> list[DecidedSite]:
        context = legality.Context(config, refusal)
        return [_decide(site, config, context, failed, host_bound, left.get(site.facts.id)) for site in some]

    def fitted(left: Mapping[str, Reason]) -> list[DecidedSite]:
        decided = decide(sites, left)
        planner.fit_workspace(_overlapped(decided), config)
        for schedule in SCHEDULES:
            schedule.fit([s for s in _overlapped(decided) if s.decision.moving.schedule == schedule.name], config)
        return decided

    left = shared_matmuls.losers([[decide([s], {})[0] for s in group] for group in shared_matmuls.sharing(sites)])
    decided = fitted(left)
    while (still := shared_matmuls.still_lost(left, decided)) != left:
        # A site for which others left their matmuls is not overlapped after all, for example for lack of workspace.
        left = still
        decided = fitted(left)
    chosen = _overlapped(decided)
    if config.mode == "report":
        for site in chosen:
            site.decision.status = "kept"
            text = "OVERLAP_INDUCTOR=report does not change the graph; set OVERLAP_INDUCTOR=on to overlap this site"
            site.decision.reasons.append(Reason("report_mode", text))
    return decided, chosen


def _decide(
    site: OverlapSite,
    config: OverlapConfig,
    context: legality.Context,
    failed: dict[str, Reason],
    host_bound: Mapping[fx.Node, host_time.HostLimit],
    left: Reason | None,
) -> DecidedSite:
    """The site with its decision. ``context`` records an overlapped site, for the checks of later sites. ``left``: why
    the site leaves a matmul to another one (``shared_matmuls``), or ``None``."""
    keep = [PlanPiece("keep")]
    if site.facts.id in failed:
        return site.decided(Decision("failed", "analytic", keep, [failed[site.facts.id]]))
    reason = left or legality.refuse(site, context)
    if reason is not None:
        status = "kept" if reason.code in _NOT_A_FAILURE else "refused"
        return site.decided(Decision(status, "forced" if reason.code == "switched_off" else "analytic", keep, [reason]))
    decision = planner.plan(site, config, host_bound.get(site.collectives[0].node))
    if decision.status == "overlapped":
        context.accept(site)
    return site.decided(decision)


def _overlapped(sites: list[DecidedSite]) -> list[DecidedSite]:
    return [s for s in sites if s.decision.status == "overlapped"]


_NOT_A_FAILURE = {"switched_off", "world_size_one"}

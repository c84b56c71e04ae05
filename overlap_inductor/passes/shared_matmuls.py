# SPDX-License-Identifier: Apache-2.0
"""Choose between sites that share a matmul, by what each is estimated to save.

A matmul between two collectives may belong to two sites, but only one of them can compute it in pieces::

    y = mm(wait_tensor(all_gather(x)), w)           # all_gather_matmul: hides the first gather
    z = wait_tensor(all_gather(y))                  # matmul_all_gather: hides the second one

For a language model's head, the second gather moves the logits, which are often larger than the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

from torch import fx

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import Reason
from overlap_inductor.report.words import microseconds
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite

MOST_SITES = 12
"""``_best`` may try 2 to the power of the number of sites. In a group of more sites than this, the first sites take the
shared matmuls."""
LEAD = 1.25
"""Later sites of a group take a matmul only if they are estimated to save this many times as much as the first ones.
Estimates are not exact, and in groups of more than 4 ranks only the first sites were measured."""


def sharing(sites: Sequence[OverlapSite]) -> list[list[OverlapSite]]:
    """The sites that share a matmul with another site, in groups. Sites in different groups share none."""
    groups: dict[int, list[OverlapSite]] = {}
    group_of: dict[fx.Node, int] = {}
    for number, site in enumerate(sites):
        members: list[OverlapSite] = []
        for other in sorted({group_of[m.node] for m in site.matmuls if m.node in group_of}):
            members += groups.pop(other)
        groups[number] = [*members, site]
        group_of.update((m.node, number) for member in groups[number] for m in member.matmuls)
    return [group for group in groups.values() if len(group) > 1]


def losers(groups: Sequence[Sequence[DecidedSite]]) -> dict[str, Reason]:
    """``{site id: reason}`` for each site that should leave a matmul to another site.

    Args:
        groups: the groups of ``sharing``. Each site is decided as if the others were not there.
    """
    found: dict[str, Reason] = {}
    for group in groups:
        able = [site for site in group if site.decision.status == "overlapped"]
        if len(able) > MOST_SITES or any(saved_us(site.decision) is None for site in able):
            continue
        kept = _best(able)
        for site in able:
            if site not in kept:
                owner = next((other for other in kept if _share(site, other)), None)
                # A site that saves nothing may share no matmul with those that are kept.
                if owner is not None:
                    found[site.facts.id] = _left_to(owner, site)
    return found


def saved_us(decision: Decision) -> float | None:
    """Estimated microseconds that the decision saves at the example's token count; ``None`` without estimates."""
    estimate, schedule = decision.moving.estimate_us, decision.moving.schedule
    return estimate["keep"] - estimate[schedule] if {"keep", schedule} <= estimate.keys() else None


def _best(sites: list[DecidedSite]) -> list[DecidedSite]:
    """The sites that save the most together, no two of which share a matmul. Sites that save nothing are left out.
    Without a clear lead (``LEAD``) of the later sites, the first ones are taken."""
    sites = [site for site in sites if (saved_us(site.decision) or 0.0) > 0.0]
    if not sites:
        return []
    first, *rest = sites
    taken = [first, *_best([site for site in rest if not _share(first, site)])]
    if all(not _share(first, site) for site in rest):
        return taken
    left = _best(rest)
    return left if _total(left) > LEAD * _total(taken) else taken


def _total(sites: Sequence[DecidedSite]) -> float:
    return sum(saved_us(site.decision) or 0.0 for site in sites)


def _share(one: OverlapSite, other: OverlapSite) -> bool:
    return not {m.node for m in one.matmuls}.isdisjoint(m.node for m in other.matmuls)


def _left_to(owner: DecidedSite, site: DecidedSite) -> Reason:
    matmul = next(m.node for m in site.matmuls if m.node in {o.node for o in owner.matmuls})
    more, less = (microseconds(saved_us(s.decision) or 0.0) for s in (owner, site))
    text = f"{matmul.name} belongs to site {owner.facts.id}, which is estimated to save {more}, not {less}"
    return Reason("shares_nodes", text)


def still_lost(lost: Mapping[str, Reason], decided: Sequence[DecidedSite]) -> dict[str, Reason]:
    """``lost`` without the sites whose shared matmuls no overlapped site has taken. So another site may take them."""
    taken = {m.node for site in decided if site.decision.status == "overlapped" for m in site.matmuls}
    return {
        site.facts.id: lost[site.facts.id]
        for site in decided
        if site.facts.id in lost and any(m.node in taken for m in site.matmuls)
    }

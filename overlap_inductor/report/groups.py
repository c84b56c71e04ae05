# SPDX-License-Identifier: Apache-2.0
"""Show repeated layers as one row: group sites that differ only in the numbers inside their module names.

``layers.0.mlp.down_proj`` ... ``layers.31.mlp.down_proj``  ->  ``layers.{0..31}.mlp.down_proj``
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING
from typing import Any

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import SiteFacts

if TYPE_CHECKING:
    from overlap_inductor.report.report import NearMiss
    from overlap_inductor.report.report import OverlapReport
    from overlap_inductor.report.report import SiteReport

# A layer's number is a whole component ("layers.3.", "layers[3]"). So "fc1" and "fc2" stay apart.
_INDEX = re.compile(r"(?<=[.\[/])\d+(?=[.\]/]|$)|^\d+(?=[.\]/])")
# FX numbers its nodes: mm, mm_1, mm_2. Reasons that differ only in this number count as the same.
_NODE_NUMBER = re.compile(r"(?<=[A-Za-z])_\d+\b")
_NO_MODULE = "(no module name)"


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ at most in ids, names of process groups, numbers in module names, and names in the texts of
    reasons. ``module`` is the common name."""

    module: str
    sites: tuple[SiteReport, ...]

    @property
    def facts(self) -> SiteFacts:
        return self.sites[0].facts

    @property
    def decision(self) -> Decision:
        return self.sites[0].decision

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The first site's reasons. Those of other sites differ at most in the names of modules and nodes."""
        return tuple(self.decision.reasons)


@dataclass(frozen=True)
class MissGroup:
    """Near misses whose collectives and reasons differ at most in names. ``module`` is the common name."""

    module: str
    misses: tuple[NearMiss, ...]

    @property
    def collective(self) -> Collective:
        return self.misses[0].collective

    @property
    def reason(self) -> Reason:
        return self.misses[0].reason


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0..2,5``."""
    values = sorted(set(numbers))
    parts = []
    for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}..{members[-1]}")
    return ",".join(parts)


def template(name: str) -> tuple[str, tuple[int, ...]]:
    """``layers.3.mlp`` -> (``layers.{}.mlp``, (3,))."""
    return _INDEX.sub("{}", name), tuple(int(n) for n in _INDEX.findall(name))


def common_names(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """For each set of ``names`` that differ only in their numbers: ``(their common name, their positions in names)``.

    ``a.{0..3}.b.{0,1}`` stands for every combination. If a combination is missing, the names are split by the first
    number that varies. So a common name includes only layers that exist.
    """
    by_template: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for position, name in enumerate(names):
        text, numbers = template(name)
        by_template.setdefault(text, []).append((numbers, position))
    found = []
    for text, members in by_template.items():
        for block in _full_blocks(members):
            columns = zip(*(numbers for numbers, _ in block), strict=True)
            name = text
            for shown in map(ranges, columns):
                name = name.replace("{}", shown if shown.isdigit() else f"{{{shown}}}", 1)
            found.append((name, [position for _, position in block]))
    return sorted(found, key=lambda item: item[1][0])


def group_sites(report: OverlapReport) -> list[SiteGroup]:
    """The report's sites, with repeated layers in one group, in the report's order. Groups that differ only in layer
    numbers follow each other."""
    alike: dict[str, list[SiteReport]] = {}
    for site in report.sites:
        alike.setdefault(_site_key(site), []).append(site)
    groups = []
    for sites in alike.values():
        for name, positions in common_names([s.facts.module or _NO_MODULE for s in sites]):
            groups.append((min(map(report.sites.index, sites)), SiteGroup(name, tuple(sites[p] for p in positions))))
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def group_near_misses(report: OverlapReport) -> list[MissGroup]:
    """The report's near misses, one group for each collective, reason and common name. Reasons with other values, such
    as sizes, count as different."""
    alike: dict[str, list[NearMiss]] = {}
    for miss in report.near_misses:
        key = repr((_without_names(miss.collective), miss.reason.code, _anonymous(miss.reason.text, miss.module)))
        alike.setdefault(key, []).append(miss)
    groups = []
    for misses in alike.values():
        for name, positions in common_names([m.module or _NO_MODULE for m in misses]):
            groups.append(MissGroup(name, tuple(misses[p] for p in positions)))
    return groups


def has_layer_numbers(report: OverlapReport) -> bool:
    """Whether a site's module name holds the number of a repeated layer."""
    return any(template(site.facts.module)[1] for site in report.sites)


def _full_blocks(members: list[tuple[tuple[int, ...], int]]) -> list[list[tuple[tuple[int, ...], int]]]:
    distinct = {numbers for numbers, _ in members}
    columns = list(zip(*distinct, strict=True))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if prod(len(set(column)) for column in columns) == len(distinct) or not varying:
        return [members]
    parts: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for member in members:
        parts.setdefault(member[0][varying[0]], []).append(member)
    return [block for part in parts.values() for block in _full_blocks(part)]


def _site_key(site: SiteReport) -> str:
    facts, decision = site.facts, site.decision
    reasons = [(r.code, _anonymous(r.text, facts.module, facts.id)) for r in decision.reasons]
    derived = _anonymous(facts.derived_from or "", facts.module, facts.id)
    return repr(
        (
            template(facts.module)[0],
            facts.pattern,
            _without_names(facts.collective),
            facts.matmuls,
            derived,
            decision.status,
            decision.source,
            decision.plan,
            reasons,
        )
    )


def _without_names(collective: Collective) -> dict[str, Any]:
    return {name: value for name, value in vars(collective).items() if name != "group_name"}


def _anonymous(text: str, *names: str) -> str:
    for name in names:
        if name:
            text = text.replace(name, "{}")
    return _NODE_NUMBER.sub("", template(text)[0])

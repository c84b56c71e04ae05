# SPDX-License-Identifier: Apache-2.0
"""``OverlapReport``: the outcome of the pass on one graph, as data.

The report is stored with the compiled graph and used on a cache hit. So it holds neither this process's rank nor the
dump folder.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.report.failure import Failure

SCHEMA_VERSION = 1


@dataclass
class SiteReport:
    facts: SiteFacts
    decision: Decision

    def to_dict(self) -> dict[str, Any]:
        return {**self.facts.to_dict(), "decision": self.decision.to_dict()}


@dataclass
class NearMiss:
    """A collective that is not a site, with the reason and the module in which it stands."""

    collective: Collective
    reason: Reason
    module: str = ""

    def to_dict(self) -> dict[str, Any]:
        collective = {**self.collective.__dict__, "ranks": list(self.collective.ranks)}
        return {"collective": collective, "module": self.module, "reason": self.reason.__dict__.copy()}


@dataclass
class OverlapReport:
    """One graph's report. ``str()`` gives a short text, and ``to_text`` the whole report.

    Attributes:
        graph: name of the graph, equal on every rank (Dynamo's compile id such as ``0_0``).
        phase: ``forward`` | ``backward`` | ``inference``.
        before / after: the FX graph's readable code before and after the pass. Empty in a graph without collectives.
        plan_hash: digest of the plan in ``exchange``. Empty if the graph is as written.
        exchange: JSON text of the graph's ``ExchangePlan``. Empty in a graph without collectives.
        groups: ``[workspace that the group's sites need (JSON text), its limit in MiB]`` for each process group. ``[]``
            for a group whose sites need no workspace.
        workspaces: symmetric memory that the sites hold on each rank: ``{"ranks", "bytes"}`` for each group that has
            any.
        notices: further texts for the user, for example that ranks differ.
        failures: errors inside the pass.
        same_inputs: ``[index, name, group, lasting]`` of each graph input that a rewritten stretch reads. All ranks of
            the group must have the same input. ``lasting``: true for a parameter or buffer.
        stretches: what the sequence-parallel rewrite did with each stretch of the graph.
    """

    overlap_inductor: str
    torch: str
    mode: str
    phase: str
    graph: str
    world_size: int
    config: dict[str, Any] = field(default_factory=dict)
    sites: list[SiteReport] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    before: str = ""
    after: str = ""
    plan_hash: str = ""
    exchange: str = ""
    groups: dict[str, list[Any]] = field(default_factory=dict)
    workspaces: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    same_inputs: list[list[Any]] = field(default_factory=list)
    stretches: list[StretchFacts] = field(default_factory=list)

    def counters(self) -> Counter[str]:
        """The counters ``sites_found``, ``sites_overlapped``, ``schedule.<name>`` and ``reason.<code>``. If there
        are failures, also ``failed``. If there are stretches, also ``stretches_found`` and ``stretches_rewritten``."""
        counts: Counter[str] = Counter(sites_found=len(self.sites))
        if self.failures:
            counts["failed"] = len(self.failures)
        for site in self.sites:
            counts.update(f"reason.{r.code}" for r in site.decision.reasons)
            if site.decision.status == "overlapped":
                counts["sites_overlapped"] += 1
                counts.update(f"schedule.{p.schedule}" for p in site.decision.plan)
            else:
                counts["schedule.keep"] += 1
        counts.update(f"reason.{miss.reason.code}" for miss in self.near_misses)
        for stretch in self.stretches:
            counts["stretches_found"] += 1
            counts["stretches_rewritten"] += stretch.status == "rewritten"
        return counts

    def to_dict(self, graphs: bool = False) -> dict[str, Any]:
        """The content of ``sites.json``. With ``graphs``, also the fields that are needed to restore the report."""
        value: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "overlap_inductor": self.overlap_inductor,
            "torch": self.torch,
            "mode": self.mode,
            "phase": self.phase,
            "graph": self.graph,
            "world_size": self.world_size,
            "config": self.config,
            "plan_hash": self.plan_hash,
            "workspaces": self.workspaces,
            "notices": self.notices,
            "failures": [f.to_dict() for f in self.failures],
            "sites": [s.to_dict() for s in self.sites],
            "near_misses": [m.to_dict() for m in self.near_misses],
            "stretches": [s.to_dict() for s in self.stretches],
        }
        if graphs:
            value.update(before=self.before, after=self.after, exchange=self.exchange, groups=self.groups)
            value.update(same_inputs=self.same_inputs)
        return value

    def __str__(self) -> str:
        """The report's title, the estimated time of all sites together (as written, and by the plan), and the first
        rows of the table of sites. Sites that differ only in the number of their layer share a row."""
        from overlap_inductor.report.short import render_short

        return render_short(self)

    def __repr__(self) -> str:
        from overlap_inductor.report.short import title

        return f"<OverlapReport {title(self)}>"

    def _repr_html_(self) -> str:
        from overlap_inductor.report.html.notebook import render_compact

        return render_compact(self)

    def to_text(self) -> str:
        """The content of ``report.txt``."""
        from overlap_inductor.report.text import render_text

        return render_text(self)

    def to_html(self) -> str:
        """The content of ``index.html``: a document that loads nothing from elsewhere."""
        from overlap_inductor.report.html.page import render_html

        return render_html(self)

    def to_json(self, graphs: bool = False) -> str:
        return json.dumps(self.to_dict(graphs), indent=1, sort_keys=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> OverlapReport:
        """The report that ``to_json(graphs=True)`` wrote. Raises ``ValueError`` for another schema version."""
        value = json.loads(text)
        if value.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError("the stored overlap report has another schema version; clear Inductor's cache folder")
        sites = [SiteReport(SiteFacts.from_dict(s), Decision.from_dict(s["decision"])) for s in value.pop("sites")]
        misses = [
            NearMiss(
                Collective(**{**m["collective"], "ranks": tuple(m["collective"]["ranks"])}),
                Reason(**m["reason"]),
                m["module"],
            )
            for m in value.pop("near_misses")
        ]
        failures = [Failure(**f) for f in value.pop("failures", [])]
        stretches = [StretchFacts.from_dict(s) for s in value.pop("stretches", [])]
        return cls(sites=sites, near_misses=misses, failures=failures, stretches=stretches, **value)

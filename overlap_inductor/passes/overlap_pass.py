# SPDX-License-Identifier: Apache-2.0
"""The overlap pass replaces matmuls and the collectives next to them by overlap ops.

Contract: ``graph`` is a functional post-grad graph. The pass changes it in place:

- It rewrites the sites that are legal and chosen.
- It orders the other collectives of these sites' groups, and may delay matmuls (``passes.delayed_matmuls``).
- It erases each all-gather of a stretch that was rewritten, if this graph does not read the all-gather's result.

If the rewrite of a site fails, the graph is restored and the other sites are tried again. The pass does not
communicate. Ranks with equal graphs and settings decide alike. The graphs of ranks may differ. So the ranks compare
their plans before data moves (``inductor.compared_call``, op ``agree``). Pseudo-code::

    sites  = find(graph)                                  # different ops may spell the same site
    legal  = [s for s in sites if refuse(s) is None]      # may it be rewritten?
    chosen = [s for s in legal if plan(s) overlaps]       # does it pay?
    if a site that sums several matmuls has left one of them to a site that was not chosen:
        find again with this matmul in the sum; keep the result if more sites or matmuls overlap
    graph  = rewrite(graph, chosen)
    return report(sites)

The graph before and after, with an unrolled ``ring``::

    y = mm(wait_tensor(all_gather(x)), w)
    ->  token = agree(group, plan, ...)
        for each step: start the next transfer; mm of the shard that is here     # chained by token
        y from the steps' results
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.passes import agreed_plan as exchange_steps
from overlap_inductor.passes import fused_sums
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes import sequence_parallel
from overlap_inductor.passes.choose import Choice
from overlap_inductor.passes.choose import find_and_choose
from overlap_inductor.passes.graph_text import readable
from overlap_inductor.passes.rewrite import Rewriter
from overlap_inductor.passes.sequence.seams.join import join
from overlap_inductor.passes.snapshot import JOINED
from overlap_inductor.passes.snapshot import Snapshot
from overlap_inductor.passes.snapshot import not_joined
from overlap_inductor.passes.snapshot import rewrite_or_restore
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.failure import Failure
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.version import __version__

log = logging.getLogger("overlap_inductor")


def run_overlap_pass(
    graph: fx.Graph, config: OverlapConfig, *, is_inference: bool, graph_id: str = "graph", refusal: str | None = None
) -> OverlapReport:
    """Run the pass on one graph, and return its report.

    Args:
        graph: changed in place.
        is_inference: whether the graph is compiled without a backward graph.
        graph_id: the graph's name in the report.
        refusal: why this compile cannot hold overlap ops (AOTInductor, cpp_wrapper), or ``None``.

    If the pass fails, the graph computes what it did before, and the report holds the error. An error is raised only if
    the report of a failure cannot be made.
    """
    about = {
        "overlap_inductor": __version__,
        "torch": torch.__version__,
        "mode": config.mode,
        "phase": graph_phase(graph, is_inference),
        "graph": graph_id,
        "config": dict(config.cache_key()),
    }
    try:
        try:
            return _find_and_rewrite(graph, config, about, refusal)
        except Exception:
            fused_sums.put_back(graph)
            raise
    except Exception as error:  # noqa: BLE001  (a model that compiles without the pass must compile with it)
        return _report_of_failure(graph, config, about, error)


def graph_phase(graph: fx.Graph, is_inference: bool) -> str:
    """``inference``, ``forward`` or ``backward``. A training graph with tangents among its inputs is a backward
    graph."""
    if is_inference:
        return "inference"
    return "backward" if any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder") else "forward"


def _find_and_rewrite(
    graph: fx.Graph, config: OverlapConfig, about: dict[str, Any], refusal: str | None
) -> OverlapReport:
    if not any(True for _ in find_collectives(graph)):
        return OverlapReport(**about, world_size=1, **_exchange_of(graph, config, None))
    sequence_parallel.erase_unread(graph)
    before = readable(graph)
    stretches, failed = sequence_parallel.stretches_of(graph), sequence_parallel.failures_of(graph)
    sequence_parallel.note_divided(graph)
    fused_sums.take_apart(graph)
    outcome = _choose_and_rewrite(graph, config, about["phase"], refusal)
    try:
        fused_sums.put_back(graph)
        return _report(graph, config, about, outcome, before, stretches, failed)
    except Exception:
        # The report of the failure will say that nothing is overlapped, and its plan is compared with other ranks'. So
        # the rewrite must be undone.
        if outcome.snapshot is not None:
            outcome.snapshot.restore()
        raise


def _report(
    graph: fx.Graph,
    config: OverlapConfig,
    about: dict[str, Any],
    outcome: _Outcome,
    before: str,
    stretches: list[StretchFacts],
    failed: list[Failure],
) -> OverlapReport:
    """The report of a pass that did not fail.

    Args:
        before: the graph as text, before the rewrite.
        failed: what failed in the sequence-parallel pass on this graph.
    """
    sites = outcome.choice.sites
    return OverlapReport(
        **about,
        world_size=max((s.facts.collective.world_size for s in sites), default=1),
        sites=[SiteReport(s.facts, s.decision) for s in sites],
        near_misses=outcome.choice.found.near_misses,
        before=before,
        after=readable(graph),
        notices=_notices(outcome, failed),
        failures=[*failed, *outcome.failures],
        same_inputs=sequence_parallel.same_inputs_of(graph),
        stretches=stretches,
        **_exchange_of(graph, config, outcome.rewritten),
    )


@dataclass(frozen=True)
class _Rewritten:
    """Facts about a rewritten graph. The ranks of ``groups`` compare ``plan``. ``workspaces`` and ``requests`` are the
    results of ``workspace_bytes`` and ``workspace`` in ``passes.plan``."""

    plan: ExchangePlan
    groups: list[str]
    workspaces: list[dict[str, Any]]
    requests: dict[str, list[list[Any]]]


@dataclass(frozen=True)
class _Outcome:
    """``rewritten``: ``None`` if the graph runs as written. ``failures``: rewrites that failed and were undone.
    ``snapshot``: the graph before the rewrite that succeeded."""

    choice: Choice
    rewritten: _Rewritten | None
    failures: list[Failure]
    snapshot: Snapshot | None = None


def _choose_and_rewrite(graph: fx.Graph, config: OverlapConfig, phase: str, refusal: str | None) -> _Outcome:
    """Choose sites and rewrite them. If a rewrite fails, restore the graph and choose again without the failed site, or
    without the bands of the failed seam or without the failed chain (``passes.sequence.seams``)."""
    failures: list[Failure] = []
    while True:
        failed = {
            site: Reason("rewrite_failed", f.error) for f in failures if f.stage not in JOINED for site in f.sites
        }
        uncut = [f.sites for f in failures if f.stage in JOINED]
        choice = find_and_choose(graph, config, phase, refusal, failed)
        joined = join(choice.chosen, config, uncut)
        if not choice.chosen or config.mode not in ("on", "strict"):
            return _Outcome(choice, None, failures)
        # Both functions read the sites' nodes, which the rewrite erases.
        workspaces, requests = planner.workspace_bytes(choice.chosen), planner.workspace(choice.chosen)
        snapshot = Snapshot(graph)
        written = rewrite_or_restore(snapshot, choice.chosen, Rewriter(graph, config, joined))
        if not isinstance(written, Failure):
            return _Outcome(choice, _Rewritten(*written, workspaces, requests), failures, snapshot)
        failures.append(written)


def _notices(outcome: _Outcome, failed: list[Failure]) -> list[str]:
    notices = [f"the sequence-parallel rewrite failed ({f.error}); it left the graph as written" for f in failed]
    notices += [
        f"could not rewrite site {site} ({failure.error}); the graph was restored and the site runs as written"
        for failure in outcome.failures
        if failure.stage not in JOINED
        for site in failure.sites
    ]
    notices += [not_joined(f) for f in outcome.failures if f.stage in JOINED]
    return [*notices, BUG_REPORT] if notices else []


def _exchange_of(graph: fx.Graph, config: OverlapConfig, rewritten: _Rewritten | None) -> dict[str, Any]:
    """The report's fields about what the ranks compare. A rank that overlaps nothing has a plan too, because other
    ranks may overlap sites."""
    if rewritten is None:
        plan, groups = exchange_steps.plan_of(graph, config, {}, {})
        rewritten = _Rewritten(plan, list(groups), [], {})
    plan = rewritten.plan
    if sequence_parallel.rewritten(graph):
        # The sequence-parallel rewrite counts as overlap: it changes which collectives run.
        plan = replace(plan, overlaps=True)
    requests, limit = rewritten.requests, config.workspace_limit
    return {
        "plan_hash": plan.digest if plan.overlaps else "",
        "exchange": plan.to_json() if rewritten.groups else "",
        "groups": {g: [json.dumps(requests[g]), limit] if g in requests else [] for g in rewritten.groups},
        "workspaces": rewritten.workspaces,
    }


def _report_of_failure(
    graph: fx.Graph, config: OverlapConfig, about: dict[str, Any], error: Exception
) -> OverlapReport:
    """The report of a graph in which this pass overlaps nothing. Stretches that the sequence-parallel pass has
    rewritten stay rewritten, so this report holds ``stretches`` and ``same_inputs`` too."""
    failure = Failure.of(error, "pass")
    notice = f"the overlap pass failed ({failure.error}); the graph was left as written. {BUG_REPORT}"
    log.warning("overlap_inductor: %s", notice, exc_info=True)
    text = _text_of(graph)
    return OverlapReport(
        **about,
        world_size=1,
        before=text,
        after=text,
        notices=[notice],
        failures=[*sequence_parallel.failures_of(graph), failure],
        same_inputs=sequence_parallel.same_inputs_of(graph),
        stretches=sequence_parallel.stretches_of(graph),
        **_exchange_of(graph, config, None),
    )


def _text_of(graph: fx.Graph) -> str:
    """``readable(graph)``, or the error if that fails: a report of a failure must not fail."""
    try:
        return readable(graph)
    except Exception as error:  # noqa: BLE001  (the graph may hold anything; the error takes the text's place)
        return f"the graph cannot be shown as text: {type(error).__name__}: {error}\n"

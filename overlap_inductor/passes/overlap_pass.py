# SPDX-License-Identifier: Apache-2.0
"""The overlap pass replaces matmuls and the collectives beside them by overlap ops: find, check, plan, rewrite, report.

Contract: ``graph`` is a functional post-grad graph, with views normalised or not. The pass changes it in place, and
only at sites that are legal and chosen. If the rewrite of a site fails, the graph is restored, the site is reported,
and the other sites are tried again. If the pass itself fails, the graph stays as it was. The pass does not communicate.
Every decision rests on facts that all ranks of a group share, so all ranks write the same exchange plan.

Pseudo-code::

    sites  = find(graph)                                  # whatever the spelling in the graph
    legal  = [s for s in sites if refuse(s) is None]      # may it be rewritten?
    chosen = [s for s in legal if plan(s) is a schedule]  # does it pay?
    if a site that was not chosen holds a matmul that another site could use: find again without that site
    graph  = rewrite(graph, chosen)
    return report(sites)

The graph before and after, with an unrolled ``ring``::

    y = mm(wait_tensor(all_gather(x)), w)
    ->  token = agree(group, plan, ...)
        for each step: start the next transfer; mm of the shard that is here     # chained by token
        y from the steps' results
"""

from __future__ import annotations

import copy
import json
import logging
from typing import Any
from typing import NamedTuple

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.passes import agreed_plan as exchange_steps
from overlap_inductor.passes import check as legality
from overlap_inductor.passes import fused_sums
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.passes.rewrite import Rewriter
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.failure import Failure
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat import operators
from overlap_inductor.version import __version__

log = logging.getLogger("overlap_inductor")


def run_overlap_pass(
    graph: fx.Graph, config: OverlapConfig, *, is_inference: bool, graph_id: str = "graph", refusal: str | None = None
) -> OverlapReport:
    """Run the pass on one graph.

    Args:
        refusal: a sentence that says why this compile cannot hold overlap ops (AOTInductor, cpp_wrapper), or ``None``.

    If the pass itself fails, the graph stays as it was. The report then holds its text and the error, and ``strict``
    mode raises when the report is published.
    """
    phase = graph_phase(graph, is_inference)
    try:
        try:
            return _find_and_rewrite(graph, config, phase, graph_id, refusal)
        finally:
            fused_sums.put_back(graph)
    except Exception as error:  # noqa: BLE001  (a model that compiles without the pass must compile with it)
        failure = Failure.of(error, "pass")
        notice = f"the overlap pass failed ({failure.error}); the graph was left as written. {BUG_REPORT}"
        log.warning("overlap_inductor: %s", notice, exc_info=True)
        text = _text_of(graph)
        report = {
            "overlap_inductor": __version__,
            "torch": torch.__version__,
            "mode": config.mode,
            "phase": phase,
            "graph": graph_id,
        }
        # Other ranks may overlap this graph, so they must learn that this rank does not.
        plan, groups = exchange_steps.plan_of(graph, config, {}, {})
        exchange, needs = plan.to_json() if groups else "", {name: list[Any]() for name in groups}
        return OverlapReport(
            **report,
            world_size=1,
            config=dict(config.cache_key()),
            before=text,
            after=text,
            exchange=exchange,
            groups=needs,
            notices=[notice],
            failures=[failure],
        )


def _text_of(graph: fx.Graph) -> str:
    """``readable(graph)``. If that is what fails, its error instead: a report of a failure must not fail."""
    try:
        return readable(graph)
    except Exception as error:  # noqa: BLE001  (the graph may hold anything; the error takes the text's place)
        return f"the graph cannot be shown as text: {type(error).__name__}: {error}\n"


def _find_and_rewrite(
    graph: fx.Graph, config: OverlapConfig, phase: str, graph_id: str, refusal: str | None
) -> OverlapReport:
    failed: dict[str, Reason] = {}
    failures: list[Failure] = []
    before = readable(graph) if any(True for _ in find_collectives(graph)) else ""
    if before:
        fused_sums.take_apart(graph)
    plan: ExchangePlan | None = None
    groups: list[str] = []
    workspaces: list[dict[str, Any]] = []
    needs: dict[str, list[list[Any]]] = {}
    while True:
        found, sites, chosen = _find_and_choose(graph, config, phase, refusal, failed)
        if not chosen or config.mode not in ("on", "strict"):
            break
        # Computed before the rewrite, which erases the sites' nodes.
        workspaces, needs = planner.workspace_bytes(chosen), planner.workspace(chosen)
        rewriter = Rewriter(graph, config)
        failure = rewrite_or_restore(graph, chosen, rewriter)
        if failure is None:
            plan, groups = rewriter.plan, rewriter.groups
            break
        # The graph was restored. Try again without the site that failed.
        failures.append(failure)
        failed.update((site, Reason("rewrite_failed", failure.error)) for site in failure.sites)
    fused_sums.put_back(graph)
    if plan is None:
        workspaces, needs = [], {}
        plan, groups = exchange_steps.plan_of(graph, config, {}, {})
    notices = [
        f"could not rewrite site {site} ({reason.text}); the graph was restored and the site runs as written"
        for site, reason in failed.items()
    ]
    if failures:
        notices.append(BUG_REPORT)

    return OverlapReport(
        overlap_inductor=__version__,
        torch=torch.__version__,
        mode=config.mode,
        phase=phase,
        graph=graph_id,
        world_size=max((s.facts.collective.world_size for s in sites), default=1),
        config=dict(config.cache_key()),
        sites=[SiteReport(s.facts, s.decision) for s in sites],
        near_misses=found.near_misses,
        before=before,
        after=readable(graph) if before else "",
        plan_hash=plan.digest if plan.overlaps else "",
        exchange=plan.to_json() if groups else "",
        groups={name: [json.dumps(needs[name]), config.workspace_limit] if name in needs else [] for name in groups},
        workspaces=workspaces,
        notices=notices,
        failures=failures,
    )


class Choice(NamedTuple):
    """What one walk found: ``sites`` with their decisions, of which ``chosen`` are to be overlapped."""

    found: SiteFinder
    sites: list[DecidedSite]
    chosen: list[DecidedSite]


def _find_and_choose(
    graph: fx.Graph, config: OverlapConfig, phase: str, refusal: str | None, failed: dict[str, Reason]
) -> Choice:
    """Find and decide all sites.

    If a term of a sum is another site's matmul, the reduction leaves it to that site. Two repairs follow, each kept
    only if it overlaps more:

    - If that other site is not overlapped, find again and leave it nothing.
    - If the matmul that was left holds the rest of the sum as its bias, take it apart (``fused_sums.unfold``) and find
      again.
    """

    def chosen_without(idle: set[str]) -> Choice:
        found = SiteFinder(graph, phase, idle).run()
        return Choice(found, *choose(found.sites, config, refusal, failed))

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
    """Names of the collectives of sites that are not overlapped, though a reduction left them a matmul."""
    taken, left = {s.facts.id for s in choice.chosen}, choice.found.left
    return {
        s.collectives[0].node.name
        for s in choice.sites
        if s.facts.id not in taken and not left.isdisjoint(m.node for m in s.matmuls)
    }


def _served(choice: Choice) -> tuple[int, int]:
    """Number of sites to overlap, and of their matmuls."""
    return len(choice.chosen), sum(len(s.matmuls) for s in choice.chosen)


def choose(
    sites: list[OverlapSite], config: OverlapConfig, refusal: str | None, failed: dict[str, Reason]
) -> tuple[list[DecidedSite], list[DecidedSite]]:
    """Decide every site: ``(all sites with their decisions, those to overlap)``. ``failed``: by id, why a site's
    rewrite has failed already."""
    context = legality.Context(config, refusal)
    decided = [_decide(site, config, context, failed) for site in sites]
    planner.fit_workspace(_overlapped(decided), config)
    for schedule in SCHEDULES:
        schedule.fit([s for s in _overlapped(decided) if s.decision.moving.schedule == schedule.name], config)
    chosen = _overlapped(decided)
    if config.mode == "report":
        for site in chosen:
            site.decision.status = "kept"
            text = "OVERLAP_INDUCTOR=report does not change the graph; set OVERLAP_INDUCTOR=on to overlap this site"
            site.decision.reasons.append(Reason("report_mode", text))
    return decided, chosen


def _decide(
    site: OverlapSite, config: OverlapConfig, context: legality.Context, failed: dict[str, Reason]
) -> DecidedSite:
    """The site with its decision. A site that is to be overlapped is accepted into ``context``."""
    keep = [PlanPiece("keep")]
    if site.facts.id in failed:
        return site.decided(Decision("failed", "analytic", keep, [failed[site.facts.id]]))
    reason = legality.refuse(site, context)
    if reason is not None:
        status = "kept" if reason.code in _NOT_A_FAILURE else "refused"
        return site.decided(Decision(status, "forced" if reason.code == "switched_off" else "analytic", keep, [reason]))
    decision = planner.plan(site, config)
    if decision.status == "overlapped":
        context.accept(site)
    return site.decided(decision)


def _overlapped(sites: list[DecidedSite]) -> list[DecidedSite]:
    return [s for s in sites if s.decision.status == "overlapped"]


_NOT_A_FAILURE = {"switched_off", "world_size_one"}


def rewrite_or_restore(graph: fx.Graph, chosen: list[DecidedSite], rewriter: Rewriter) -> Failure | None:
    """Rewrite ``chosen``; if that fails, restore the graph. Returns the failure with the site that failed, or with all
    sites if none can be blamed; ``None`` on success."""
    snapshot = fx.Graph()
    _copy(graph, snapshot)
    try:
        rewriter.apply(chosen)
    except Exception as error:  # noqa: BLE001  (the model must compile in any case; the report names the error)
        blamed = [rewriter.current] if rewriter.current is not None else chosen
        ids = " or ".join(site.facts.id for site in blamed)
        log.warning(
            "overlap_inductor: could not rewrite site %s (%s); the graph was restored and the site runs as written. %s",
            ids,
            error,
            BUG_REPORT,
            exc_info=True,
        )
        # The graph may be out of order, so erasing users first is not possible: cut every edge, then erase. A node that
        # was inserted before an erased one is not in ``graph.nodes``, but is still a user of nodes that are.
        for node in {*graph.nodes, *(user for n in graph.nodes for user in n.users)}:
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        _copy(snapshot, graph)
        return Failure.of(error, "rewrite", [site.facts.id for site in blamed])
    return None


def _copy(source: fx.Graph, target: fx.Graph) -> None:
    mapping: dict[fx.Node, fx.Node] = {}
    result = target.graph_copy(source, mapping)
    output = target.output(result)
    output.meta = copy.copy(next(n for n in reversed(source.nodes) if n.op == "output").meta)
    for node, twin in mapping.items():
        twin.meta = copy.copy(node.meta)
        # Without this a copy gets another name, because the graph still counts the erased names as taken.
        twin.name = node.name


def graph_phase(graph: fx.Graph, is_inference: bool) -> str:
    if is_inference:
        return "inference"
    return "backward" if any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder") else "forward"


def readable(graph: fx.Graph) -> str:
    """The graph as text, with dtypes and shapes, one node a line; without metadata that differs between ranks or
    runs."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = ""
        if isinstance(value, torch.Tensor):
            kind = f": {str(value.dtype).removeprefix('torch.')}[{', '.join(str(s) for s in value.shape)}]"
        target = operators.lowering_name(node) or str(node.target).removeprefix("torch.ops.")
        arguments = ", ".join(
            [*(_argument(a) for a in node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
        )
        if node.op == "placeholder":
            lines.append(f"{node.name}{kind} = input")
        elif node.op == "output":
            lines.append(f"return {arguments}")
        else:
            lines.append(f"{node.name}{kind} = {target}({arguments})")
    return "\n".join(lines) + "\n"


def _argument(value: object) -> str:
    """One argument as text. The plan that ``agree`` carries is shortened to its digest."""
    if isinstance(value, str):
        return f"plan {json.loads(value)['plan']}" if value.startswith('{"config"') else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v) for v in value)}]"
    return str(value)

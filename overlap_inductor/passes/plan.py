# SPDX-License-Identifier: Apache-2.0
"""Plan which schedule serves which token counts of a site.

The planner reads only facts that all ranks share. Pseudo-code::

    can  = [s for s in SCHEDULES if s is allowed and s.why_not(site) is None]
    cost = {s: s.seconds(site) for s in can}
    plan = s.where_it_pays(site) of the cheapest s in can that pays; keep if none pays
           # where the host is the limit, a plan may only keep the site, or replay its launches
    if the token count is dynamic: replace plan by the first s.joined(plan of s, others' plans) that is not None
           # others' plans: of the schedules that an op of s can call
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.lowerings.registry import schedule_named
from overlap_inductor.lowerings.schedule import SiteSchedule
from overlap_inductor.passes.host_time import HostLimit
from overlap_inductor.report.words import microseconds
from overlap_inductor.runtime.arena import CREDITS
from overlap_inductor.runtime.arena import SLOTS
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import planned_bytes
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.torch_compat.cuda_graphs import captured_by_inductor


def plan(site: OverlapSite, config: OverlapConfig, host_bound: HostLimit | None = None) -> Decision:
    """The decision for one legal site. ``host_bound``: the sizes at which no transfer of the site's graph is worth
    hiding, or ``None``. ``fit_workspace`` and ``SiteSchedule.fit`` may change the decision later."""
    asked = [s for s in SCHEDULES if config.schedule in ("auto", s.name)]
    refusals = {s.name: _why_not(s, site, config) for s in asked}
    able = [s for s in asked if refusals[s.name] is None]
    if not able:
        reason = Reason("schedule_not_available", _why_none(refusals, config))
        forced = (config.schedule, config.transport) != ("auto", "auto")
        return Decision("refused", "forced" if forced else "analytic", [PlanPiece("keep")], [reason])
    estimate = _estimate_us(site, config, able)
    if config.schedule != "auto":
        return Decision("overlapped", "forced", _with(estimate, able[0].forced(site, config)))
    reasons, plans = [], {}
    fewest = host_bound.fewest(site.nodes.tokens) if host_bound is not None else 0
    for schedule in sorted(able, key=lambda s: estimate.get(s.name, 0.0)):
        found = schedule.where_it_pays(site, config, fewest or 0)
        if isinstance(found, Reason):
            reasons.append(found)
        elif host_bound is not None and found is not None and any(_loses(p, site, fewest) for p in found):
            reasons = [host_bound.reason]
        elif found is not None:
            plans[schedule.name] = found
        elif host_bound is not None and fewest and schedule.where_it_pays(site, config) is not None:
            reasons = [host_bound.reason]
    if not plans:
        return Decision(
            "kept",
            "analytic",
            [PlanPiece("keep", None, (0, None), {}, estimate)],
            reasons or [_too_small(able, estimate)],
        )
    first = next(iter(plans.values()))
    if not isinstance(site.nodes.tokens, int):
        called = [plans[s.name] for s in SCHEDULES if s.called_by_others and s.name in plans]
        joined = [s.joined(site, plans[s.name], called) for s in able if s.name in plans]
        first = next((plan for plan in joined if plan is not None), first)
    return Decision("overlapped", "analytic", _with(estimate, first))


def _loses(piece: PlanPiece, site: OverlapSite, fewest: int | None) -> bool:
    """Whether ``piece`` may be slower than the graph as written, because it serves sizes at which the host limits the
    graph. With a fixed number of tokens, ``small_message`` is not slower, because its launches are replayed. In a CUDA
    graph, it may be slower, because the hosts wait for each other before a replay.

    Args:
        fewest: ``HostLimit.fewest`` of the site's tokens.
    """
    below = fewest is None or piece.tokens[0] < fewest
    replays = not piece.overlaps and isinstance(site.nodes.tokens, int) and not captured_by_inductor()
    return below and piece.schedule != "keep" and not replays


def _with(estimate: dict[str, float], pieces: list[PlanPiece]) -> list[PlanPiece]:
    return [p if p.schedule == "keep" else dataclasses.replace(p, estimate_us=estimate) for p in pieces]


def _why_none(refusals: dict[str, str | None], config: OverlapConfig) -> str:
    """Why no schedule can compute a site. ``refusals``: each schedule's reason, by name."""
    alike: dict[str, list[str]] = {}
    for name, refusal in refusals.items():
        alike.setdefault(refusal or "", []).append(name)
    if config.schedule != "auto":
        return f"OVERLAP_INDUCTOR_SCHEDULE={config.schedule}: {'; '.join(alike)}"
    asked = "" if config.transport == "auto" else f" over OVERLAP_INDUCTOR_TRANSPORT={config.transport}"
    return f"no schedule can compute the site{asked}. " + "; ".join(
        f"{', '.join(names)}: {refusal}" for refusal, names in alike.items()
    )


def _why_not(schedule: SiteSchedule, site: OverlapSite, config: OverlapConfig) -> str | None:
    if config.transport not in ("auto", *schedule.transports):
        wanted = "" if config.schedule == "auto" else f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, but "
        if not schedule.transports:
            return f"{wanted}schedule {schedule.name} leaves the transfer to the program's own collective"
        return f"{wanted}schedule {schedule.name} can only use transport {' or '.join(schedule.transports)}"
    if site.facts.pattern not in schedule.patterns:
        return f"no {schedule.noun} computes {site.facts.pattern}"
    return schedule.why_not(site, config)


def _estimate_us(site: OverlapSite, config: OverlapConfig, able: list[SiteSchedule]) -> dict[str, float]:
    """Estimated microseconds of ``keep``, ``matmul``, ``collective`` and every schedule in ``able``. Empty if a size of
    the site depends on data."""
    if not has_example(site):
        return {}
    sizes, machine = sizes_at(site), machine_of(site, config)
    matmul, collective = cost_model.written_seconds(sizes, machine), cost_model.collective_seconds(sizes, machine)
    seconds = {
        "keep": matmul + collective,
        "matmul": matmul,
        "collective": collective,
        **{s.name: s.seconds(site, config) for s in able},
    }
    return {name: round(value * 1e6, 1) for name, value in seconds.items()}


def _too_small(able: list[SiteSchedule], estimate: dict[str, float]) -> Reason:
    schedules = " and ".join(f"{microseconds(estimate[s.name])} {s.called}" for s in able)
    parts = {name: estimate[name] for name in ("matmul", "collective")}
    shorter = min(parts, key=parts.__getitem__)
    most = 100 * parts[shorter] / estimate["keep"]
    return Reason(
        "too_small",
        f"estimated {schedules}, against {microseconds(estimate['keep'])} as written (matmul"
        f" {microseconds(parts['matmul'])}, collective {microseconds(parts['collective'])}); hiding all of the"
        f" {shorter} would save {most:.1f} %",
    )


def _requests(sites: list[DecidedSite]) -> dict[str, list[tuple[DecidedSite, Request]]]:
    """``{group: [(site, its workspace request)]}``, in graph order."""
    found: dict[str, list[tuple[DecidedSite, Request]]] = {}
    for site in sites:
        moving = [p for p in site.decision.plan if p.schedule != "keep"]
        for request in filter(None, (schedule_named(p.schedule).request(site, p) for p in moving)):
            found.setdefault(site.facts.collective.group_name, []).append((site, request))
    return found


def fit_workspace(sites: list[DecidedSite], config: OverlapConfig) -> None:
    """Leave sites as written, largest request first, until the workspace of each group fits ``config.workspace_limit``
    (MiB)."""
    limit = config.workspace_limit << 20
    for members in _requests(sites).values():
        world_size = members[0][0].facts.collective.world_size
        while members and (total := planned_bytes([r for _, r in members], SLOTS, world_size)) > limit:
            member = max(members, key=lambda m: m[1].nbytes)
            members[:] = [m for m in members if m[0] is not member[0]]
            text = (
                f"the group's kernels would hold {total >> 20} MiB of workspace, but OVERLAP_INDUCTOR_WORKSPACE_LIMIT"
                f" is {config.workspace_limit} MiB; raise the limit to overlap this site"
            )
            source = member[0].decision.source
            member[0].decision = Decision(
                "refused" if source == "forced" else "kept", source, [PlanPiece("keep")], [Reason("workspace", text)]
            )


def workspace_bytes(sites: list[DecidedSite]) -> list[dict[str, Any]]:
    """The symmetric memory that ``sites`` hold on each rank: ``{"ranks": ..., "bytes": ...}`` for each group, in graph
    order."""
    members = ((m[0][0].facts.collective, [r for _, r in m]) for m in _requests(sites).values())
    return [{"ranks": list(c.ranks), "bytes": planned_bytes(requests, SLOTS, c.world_size)} for c, requests in members]


def workspace(sites: list[DecidedSite]) -> dict[str, list[list[Any]]]:
    """``{group: [[site id, bytes, number of signals]]}``, in graph order. A protocol other than ``CREDITS`` is a fourth
    element."""
    return {group: [_numbers(r) for _, r in members] for group, members in _requests(sites).items()}


def _numbers(request: Request) -> list[Any]:
    protocol = [] if request.protocol == CREDITS else [request.protocol]
    return [request.site, request.nbytes, request.signals, *protocol]

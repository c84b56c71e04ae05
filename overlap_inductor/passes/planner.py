"""Plan: which schedule for which token counts. Reads facts that all ranks share, never a measurement of one rank."""

from __future__ import annotations

from typing import Any

import torch

from overlap_inductor import cost_model
from overlap_inductor.config import OverlapConfig
from overlap_inductor.machine import machine_for
from overlap_inductor.passes import fused_site
from overlap_inductor.passes import graph_tools as tools
from overlap_inductor.passes import ring_gather
from overlap_inductor.passes.looping import chooses_at_run_time
from overlap_inductor.passes.looping import loopable
from overlap_inductor.passes.site_nodes import GatherNodes
from overlap_inductor.passes.site_nodes import OverlapSite
from overlap_inductor.passes.steps import part_count
from overlap_inductor.schedule import Decision
from overlap_inductor.schedule import PlanPiece
from overlap_inductor.schedule import Reason
from overlap_inductor.transports import routes
from overlap_inductor.transports.arena import SLOTS
from overlap_inductor.transports.arena import planned_bytes


def tokens(site: OverlapSite) -> Any:
    """The site's token count: rows of the rank's first matmul (where its tokens are contracted, the contracted size)."""
    if isinstance(site.nodes, GatherNodes):
        consumer = site.nodes.consumers[0]
        return tools.shape(consumer.operand_node)[consumer.sharded.dim]
    matmul = site.nodes.leaves[0]
    return tools.shape(matmul.lhs)[-2]


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) and size.node.hint is not None else int(size)


def sizes_at(site: OverlapSite, scale: float = 1.0) -> cost_model.SiteSizes:
    """FLOPs and bytes of the site at its example token count, times ``scale``."""
    flops, tiles = 0.0, 0.0
    for matmul in site.matmuls:
        *batch, m, k = [_hint(s) for s in tools.shape(matmul.lhs)]
        n = _hint(tools.shape(matmul.rhs)[-1])
        flops += 2.0 * m * k * n * (batch[0] if batch else 1)
        tiles += -(-m // 128) * -(-n // 256) * (batch[0] if batch else 1)
    collective = site.collectives[0]
    world_size = collective.world_size
    source = tools.value(collective.input)
    local = float(_hint(tools.numel(list(source.shape)))) * source.dtype.itemsize
    gathers = collective.kind == "all_gather"
    sent = local * (world_size - 1) * (1.0 if gathers else 1.0 / world_size)
    legs = 2 if collective.kind == "all_reduce" else 1
    itemsize = tools.dtype(site.matmuls[0].lhs).itemsize
    return cost_model.SiteSizes(flops * scale, sent * scale, itemsize, world_size, legs, int(tiles * scale))


def plan(site: OverlapSite, config: OverlapConfig) -> Decision:
    """Decide for one site that is legal. Whether its steps are unrolled is decided for the whole graph afterwards."""
    forced = config.schedule != "auto"
    no_kernel = "" if config.schedule == "ring" else fused_site.why_not(site, config)
    if config.schedule == "fused" and no_kernel is not None:
        return Decision("refused", "forced", [PlanPiece("keep")], [Reason("schedule_not_available", f"OVERLAP_INDUCTOR_SCHEDULE=fused: {no_kernel}")])
    if config.transport == "sm_push" and (config.schedule == "ring" or no_kernel is not None):
        text = "the ring's transport is p2p" if config.schedule == "ring" else no_kernel
        return Decision("refused", "forced", [PlanPiece("keep")], [Reason("schedule_not_available", f"OVERLAP_INDUCTOR_TRANSPORT=sm_push: {text}")])
    parameters = _parameters(site, config)
    machine = machine_for(tools.value(site.collectives[0].input).device.type)
    sizes = sizes_at(site)
    estimate = cost_model.estimates_us(sizes, machine, parameters["sub_chunks"], fused=no_kernel is None)
    ring = PlanPiece("ring", "p2p", (0, None), parameters, estimate)
    fused = PlanPiece("fused", "sm_push", (0, None), fused_site.parameters(site), estimate) if no_kernel is None else None
    if forced:
        return Decision("overlapped", "forced", [ring if fused is None else fused])
    if fused is not None and cost_model.fused_pays(sizes, machine) and estimate["fused"] <= estimate["ring"]:
        return Decision("overlapped", "analytic", [fused])
    if config.transport == "sm_push":
        return Decision("kept", "analytic", [PlanPiece("keep", None, (0, None), {}, estimate)], [_too_small(estimate)])
    pays = cost_model.ring_pays(sizes, machine, parameters["sub_chunks"])
    count = tokens(site)
    if isinstance(count, int):
        if pays:
            return Decision("overlapped", "analytic", [ring])
        return Decision("kept", "analytic", [PlanPiece("keep", None, (0, None), {}, estimate)], [_too_small(estimate)])
    # The token count is only known at run time: below the break-even the looping op runs the plain collective.
    threshold = _break_even(site, config)
    if threshold is None or not chooses_at_run_time(site):
        reason = _too_small(estimate)
        if threshold is not None:
            text = f"the ring pays from about {threshold} tokens on, and this site has no op that can choose at run time"
            reason = Reason("dynamic_shape", text)
        return Decision("kept", "analytic", [PlanPiece("keep", None, (0, None), {}, estimate)], [reason])
    pieces = [
        PlanPiece("keep", None, (0, threshold - 1), {}, {}),
        PlanPiece("ring", "p2p", (threshold, None), {**parameters, "min_rows": threshold}, estimate),
    ]
    return Decision("overlapped", "analytic", pieces)


def _too_small(estimate: dict[str, float]) -> Reason:
    kernel = f" and {estimate['fused']:.0f} us in a fused kernel" if "fused" in estimate else ""
    return Reason(
        "too_small",
        f"estimated {estimate['ring']:.0f} us as a ring{kernel} against {estimate['keep']:.0f} us as it is "
        f"(matmul {estimate['matmul']:.0f}, collective {estimate['collective']:.0f})",
    )


def _parameters(site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
    parts = config.sub_chunks
    if isinstance(site.nodes, GatherNodes):
        lead = ring_gather.leading_atom(site.nodes)
        parts = part_count(lead.size, parts) if lead is not None and ring_gather.can_cut(site.nodes) else 1
        return {"sub_chunks": parts, "route": "ring" if config.ring_direction == "unidirectional" else "bidirectional"}
    if site.facts.pattern == "matmul_all_gather":
        return {"sub_chunks": part_count(tools.shape(site.nodes.leaves[0].node)[0], parts), "route": "broadcast"}
    parts = part_count(site.nodes.sharded.chunk, parts)
    travels = config.numerics == "allow_hop_rounding" and site.facts.pattern == "matmul_reduce_scatter"
    return {"sub_chunks": parts, "route": "travel" if travels else "owner"}


def _break_even(site: OverlapSite, config: OverlapConfig) -> int | None:
    """The smallest power-of-two token count at which the ring is estimated to pay, or ``None`` up to 2**20 tokens."""
    example = max(_hint(tokens(site)), 1)
    machine = machine_for(tools.value(site.collectives[0].input).device.type)
    for exponent in range(21):
        scale = 2**exponent / example
        if cost_model.ring_pays(sizes_at(site, scale), machine, config.sub_chunks):
            return 2**exponent
    return None


def fit_workspace(sites: list[OverlapSite], config: OverlapConfig) -> None:
    """Keep fused sites, the largest first, until those of each group fit the limit of its workspace."""
    groups: dict[str, list[OverlapSite]] = {}
    for site in sites:
        if _schedule(site) == "fused":
            groups.setdefault(site.facts.collective.group_name, []).append(site)
    limit = config.workspace_limit << 20
    for members in groups.values():
        world_size = members[0].facts.collective.world_size
        while members and (total := planned_bytes([fused_site.request(s) for s in members], SLOTS, world_size)) > limit:
            largest = max(members, key=lambda s: fused_site.request(s).nbytes)
            members.remove(largest)
            text = f"the group's fused kernels would hold {total >> 20} MiB of workspace, and OVERLAP_INDUCTOR_WORKSPACE_LIMIT is {config.workspace_limit} MiB"
            source = largest.decision.source  # type: ignore[union-attr]
            largest.decision = Decision("refused" if source == "forced" else "kept", source, [PlanPiece("keep")], [Reason("workspace", text)])


def workspace(sites: list[OverlapSite]) -> dict[str, list[list[Any]]]:
    """``{group: [[site, bytes, signals]]}`` of the fused sites, in graph order."""
    needs: dict[str, list[list[Any]]] = {}
    for site in sites:
        if _schedule(site) == "fused":
            request = fused_site.request(site)
            needs.setdefault(site.facts.collective.group_name, []).append([request.site, request.nbytes, request.signals])
    return needs


def _schedule(site: OverlapSite) -> str:
    assert site.decision is not None
    return site.decision.plan[-1].schedule


def unrolled_nodes(site: OverlapSite) -> int:
    """About how many FX nodes the site's unrolled steps take."""
    assert site.decision is not None
    piece = site.decision.plan[-1]
    parts, world_size = piece.parameters["sub_chunks"], site.facts.collective.world_size
    if isinstance(site.nodes, GatherNodes):
        hops = routes.hop_count(piece.parameters["route"], world_size, parts)
        return 4 + (hops + 1) * (2 + 4 * len(site.matmuls) + len(site.nodes.epilogue.nodes))
    region = max(len(site.nodes.layouts) - len(site.nodes.through), 1)
    if site.facts.pattern == "matmul_all_gather":
        return 4 + parts * (2 + region)
    legs = 2 if site.facts.collective.kind == "all_reduce" else 1
    return 8 + world_size * parts * (3 + 2 * region) + legs * parts * 6


def fit_budget(sites: list[OverlapSite], budget: int) -> None:
    """Unroll whole classes of like sites while their nodes fit the graph's budget; the others become looping ops, or are kept."""
    classes: dict[str, list[OverlapSite]] = {}
    for site in sites:
        if _schedule(site) != "ring":
            continue
        facts = site.facts
        key = repr((facts.pattern, facts.matmuls, facts.collective, [p.parameters for p in site.decision.plan]))  # type: ignore[union-attr]
        classes.setdefault(key, []).append(site)
    for members in sorted(classes.values(), key=lambda ms: sum(map(unrolled_nodes, ms))):
        cost = sum(map(unrolled_nodes, members))
        dynamic = any("min_rows" in p.parameters for p in members[0].decision.plan)  # type: ignore[union-attr]
        unroll = cost <= budget and not dynamic
        budget -= cost if unroll else 0
        for site in members:
            _set_unrolled(site, unroll, cost)


def _set_unrolled(site: OverlapSite, unroll: bool, cost: int) -> None:
    decision = site.decision
    assert decision is not None
    if not unroll and not loopable(site):
        text = f"its class of sites would add about {cost} nodes, more than is left of the graph's budget, and no looping op computes it"
        site.decision = Decision("refused", decision.source, [PlanPiece("keep")], [Reason("too_many_steps", text)])
        return
    for piece in decision.plan:
        if piece.schedule == "ring":
            piece.parameters["unrolled"] = unroll

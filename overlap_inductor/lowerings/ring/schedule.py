# SPDX-License-Identifier: Apache-2.0
"""Plan and rewrite a site with schedule ``ring``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.ring import bands_form
from overlap_inductor.lowerings.ring import cost as cost_of_ring
from overlap_inductor.lowerings.ring import sub_chunks
from overlap_inductor.lowerings.ring.form import form_of
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.lookup_nodes import GradientNodes
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.distributed import why_no_backend
from overlap_inductor.torch_compat.ordering import moving_pass
from overlap_inductor.torch_compat.target import on_gpu
from overlap_inductor.transports.registry import names_of
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transport import Exchanges

_PIECES_OF_EXPERTS = (
    "no other schedule is estimated to pay. On GPUs, the host needs several times as long to launch the ring's pieces"
    " of an expert layer as the GPU needs for the whole layer. Set OVERLAP_INDUCTOR_SCHEDULE=chunked (on NVLink) or"
    " ring to overlap the site nevertheless"
)
"""On 4 H200s, a layer of 64 experts took 24 ms as a ring and 2.2 ms as written (bench/results/experts.jsonl)."""
_LOOKUPS = (
    "no other schedule is estimated to pay. On GPUs, rings of lookups were at most 1.15 times as fast as the program as"
    " written, and mostly slower. Set OVERLAP_INDUCTOR_SCHEDULE=fused (on NVLink) or ring to overlap the site"
    " nevertheless"
)
"""On 4 H200s, lookups of width 256 took 29 ms as a ring, 25 ms as written and 12 ms in schedule ``fused``
(bench/results/lookups.jsonl). The estimate of the ring was 12 ms."""


class RingSchedule:
    """See ``SiteSchedule``. A ring computes each legal site of its patterns, if the transport can serve the site's
    group. Exceptions are:

    - on a GPU, int8 matmuls whose pieces ``torch._int_mm`` may be unable to multiply;
    - sites that ``fit_budget`` refuses.
    """

    name = "ring"
    patterns = (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "matmul_all_gather",
        "matmul_all_to_all",
        "all_to_all_matmul",
        "embedding_all_to_all",
        "all_to_all_experts",
        "all_gather_attention",
    )
    noun = "ring"
    called = "as a ring"
    ops = tuple(
        f"overlap_inductor.lowerings.ring.{name}"
        for name in (
            "ops",
            "looped_gather_ops",
            "looped_reduce_ops",
            "looped_grouped_ops",
            "looped_exchange_ops",
            "looped_uneven_ops",
            "looped_experts_ops",
        )
    )
    called_by_others = False
    holds_workspace = False
    single_op = None

    @property
    def transports(self) -> tuple[str, ...]:
        return names_of(Exchanges)

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        return why_no_backend(device)

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        device = tools.value(site.collectives[0].input).device
        no_send = _transport(config).why_not(site.facts.collective.group_name, device)
        return no_send or _too_small_for_integers(site, config)

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return [PlanPiece(self.name, _transport(config).name, (0, None), _parameters(site, config))]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        return cost_of_ring.seconds(sizes_at(site), machine_of(site, config), _parameters(site, config)["sub_chunks"])

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        if not has_example(site):
            return Reason(
                "dynamic_shape",
                "the sizes are only known when the graph runs, so nothing says how long matmul and transfer take; set"
                " OVERLAP_INDUCTOR_SCHEDULE=ring to overlap the site",
            )
        if on_gpu(tools.value(site.collectives[0].input).device):
            if site.nodes.returns:
                return Reason("host_bound", _PIECES_OF_EXPERTS)
            if isinstance(site.nodes, PooledNodes):
                return Reason("host_bound", _LOOKUPS)
        if isinstance(site.nodes.tokens, int):
            return self.forced(site, config) if _pays(site, config) else None
        # Below the break-even, the looping op runs the plain collective.
        threshold = _break_even(site, config)
        if threshold is None:
            return None
        if not form_of(site).chooses_at_run_time(site):
            return Reason(
                "dynamic_shape",
                f"the ring pays from about {threshold} tokens on, but no op for this site can choose by the token count"
                " at run time",
            )
        threshold = max(threshold, fewest)
        parameters = {**_parameters(site, config), "min_rows": threshold}
        ring = PlanPiece(self.name, _transport(config).name, (threshold, None), parameters)
        return [PlanPiece("keep", None, (0, threshold - 1)), ring]

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        fit_budget(sites, config.step_node_budget, config.sub_chunks == "auto")

    def request(self, site: OverlapSite, piece: PlanPiece) -> None:
        return None

    def anchor(self, site: OverlapSite) -> None:
        return None

    def rewrite(self, emit: StepEmitter, site: DecidedSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        form, parts, route = form_of(site), parameters["sub_chunks"], parameters["route"]
        transport = site.decision.moving.transport
        # The default transport is not named, so that the graph's text does not depend on it.
        emit.transport = () if transport in (None, self.transports[0]) else (transport,)
        if "bands" in parameters:
            return bands_form.rewrite(emit, site, parameters["bands"])
        if parameters["unrolled"]:
            return form.unrolled(emit, site, parts, route)
        return form.looping(emit, site, parts, route, parameters.get("min_rows", 0))

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        shared, unrolled = {k: v for k, v in piece.parameters.items() if k != "unrolled"}, piece.parameters["unrolled"]
        if shared["route"] == "travel" and not unrolled:
            # A looping op has no travelling accumulator: it sends each partial sum straight to its owner.
            shared["route"] = "owner"
        return ExchangeTerms(shared, form_of(site).cut(site, shared["sub_chunks"], unrolled), not unrolled)


def _transport(config: OverlapConfig) -> Exchanges:
    return transport_named(Exchanges, "" if config.transport == "auto" else config.transport)


def _parameters(site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
    """The plan's parameters, from the ring's form for this kind of site (``form.RingForm``). If ``part_counts`` offers
    several numbers of sub-chunks, ``cost.fewest_parts`` chooses one of them."""
    found = form_of(site).parameters(site, config)
    if len(part_counts(site, config)) > 1:
        sizes, machine = sizes_at(site), machine_of(site, config)
        forced = config.schedule != "auto"
        found["sub_chunks"] = cost_of_ring.fewest_parts(sizes, machine, found["sub_chunks"], forced)
    return found


def part_counts(site: OverlapSite, config: OverlapConfig) -> list[int]:
    """The numbers of sub-chunks to choose from, largest first. There are several only for a gather or a reduction on a
    CPU, if ``sub_chunks.by_estimate`` holds. On GPUs, only the largest was measured."""
    limit: int = form_of(site).parameters(site, config)["sub_chunks"]
    estimated = isinstance(site.nodes, GatherNodes | ReduceNodes) and sub_chunks.by_estimate(site, config)
    if estimated and has_example(site) and not on_gpu(tools.value(site.collectives[0].input).device):
        return cost_of_ring.halved(limit)
    return [limit]


def _too_small_for_integers(site: OverlapSite, config: OverlapConfig) -> str | None:
    """Why ``torch._int_mm`` cannot multiply a piece of an int8 matmul, or may fail to; else ``None``. On a GPU, it
    needs more than 16 rows, and multiples of 8 for N and K."""
    parts, world_size = _parameters(site, config)["sub_chunks"], site.facts.collective.world_size
    for i, (matmul, facts) in enumerate(zip(site.matmuls, site.facts.matmuls, strict=True)):
        if matmul.kind != "int_mm" or not on_gpu(tools.value(matmul.lhs).device):
            continue
        sizes = {"M": facts.m, "N": facts.n, "K": facts.k}
        if not all(isinstance(size, int) for size in sizes.values()):
            return (
                f"{matmul.node.name} multiplies int8 matrices whose sizes are only known at run time, so its pieces may"
                " be too small"
            )
        for role, count in form_of(site).counts(site, i, parts).items():
            size: Any = sizes.get(role or "", 0)
            smallest, must = [size // count], "have more than 16 rows" if role == "M" else "be a multiple of 8"
            if role == "M" and site.facts.pattern == "matmul_all_reduce" and size % world_size:
                # The last ``size % world_size`` rows have a matmul of their own.
                smallest.append(size % world_size)
                must += f", and so must the piece of the last {size % world_size} rows"
            if role == "M" and min(smallest) <= 16 or role in ("N", "K") and size % (8 * count):
                shape = " x ".join(str(sizes[r]) for r in "MNK")
                text = f"on a GPU, each of {count} pieces of {role} must {must}"
                return f"{matmul.node.name} multiplies int8 matrices of {shape} (M x N x K); {text}"
    return None


def _pays(site: OverlapSite, config: OverlapConfig, scale: float = 1.0) -> bool:
    parts = _parameters(site, config)["sub_chunks"] if scale == 1.0 else sub_chunks.most(site, config)
    return cost_of_ring.pays(sizes_at(site, scale), machine_of(site, config), parts, _measured(site))


def _measured(site: OverlapSite) -> bool:
    """Whether rings of such sites were measured. Rings of attention, and of gradients of lookups, were not measured on
    GPUs."""
    attention = any(matmul.kind == "attention" for matmul in site.facts.matmuls)
    gradients = isinstance(site.nodes, GradientNodes)
    return not ((attention or gradients) and on_gpu(tools.value(site.collectives[0].input).device))


def _break_even(site: OverlapSite, config: OverlapConfig) -> int | None:
    """The smallest power of two, up to 2**20 tokens, at which the ring should pay; ``None`` if there is none."""
    example = max(hint(site.nodes.tokens), 1)
    return next((2**exponent for exponent in range(21) if _pays(site, config, 2**exponent / example)), None)


def unrolled_nodes(site: DecidedSite, parts: int | None = None) -> int | None:
    """Estimated number of FX nodes of the site's unrolled steps. ``parts``: number of sub-chunks of a shard;
    ``None``: the number in the plan."""
    parameters = site.decision.moving.parameters
    return form_of(site).unrolled_nodes(site, parts or parameters["sub_chunks"], parameters["route"])


def fit_budget(rings: list[DecidedSite], budget: int, may_cut_less: bool) -> None:
    """Decide which rings are unrolled, and write that into their decisions. The others become looping ops.

    A ring is unrolled if its nodes fit into what is left of the graph's ``budget``. Rings without a looping op are
    decided first, in graph order. They take fewer sub-chunks if they do not fit otherwise, unless the user has set the
    number (``may_cut_less`` is then false). Then come the rings with a looping op, in graph order. A ring whose plan
    has the parameter ``min_rows`` is never unrolled. If a later pass moves nodes (``moving_pass``), no ring is
    unrolled. A site that can be neither unrolled nor looped is refused.

    Ranks may decide differently for two reasons:

    - A looping op may be able to compute a site on some ranks only.
    - Ranks may count different numbers of pointwise ops for a site, although each count is rounded down to a multiple
      of 8.

    The ranks' plans are still equal if the ranks send the same pieces, of the same values, on the same route. If plans
    differ, all ranks run the graph without overlap.
    """
    mover = moving_pass()
    loopable = {s.facts.id: form_of(s).loopable(s) for s in rings}
    left = budget
    for site in sorted(rings, key=lambda s: loopable[s.facts.id]):
        if may_cut_less and not loopable[site.facts.id]:
            _cut_less(site, left)
        decision, cost = site.decision, unrolled_nodes(site)
        dynamic = any("min_rows" in p.parameters for p in decision.plan)
        unroll = cost is not None and cost <= left and not dynamic and mover is None
        if not unroll and not loopable[site.facts.id]:
            if cost is None:
                reason = Reason(
                    "uneven_splits",
                    "each rank's part has its own number of rows; only a looping op can send such parts, and no looping"
                    " op computes this site",
                )
            elif mover is None:
                reason = Reason(
                    "too_many_steps",
                    f"the unrolled steps would add about {cost} nodes, but only {left} of the graph's budget of"
                    f" {budget} are left, and no looping op computes the site; raise OVERLAP_INDUCTOR_STEP_NODE_BUDGET",
                )
            else:
                reason = Reason(
                    "moving_pass",
                    f"torch._inductor.config.{mover} may move nodes across the in-place writes of unrolled steps, and"
                    " no looping op computes the site; switch it off to overlap the site",
                )
            site.decision = Decision("refused", decision.source, [PlanPiece("keep")], [reason])
            continue
        left -= cost if unroll and cost is not None else 0
        for piece in decision.plan:
            if piece.schedule == "ring":
                piece.parameters["unrolled"] = unroll


def _cut_less(site: DecidedSite, budget: int) -> None:
    """Halve the number of the site's sub-chunks until its steps fit into ``budget`` nodes. If not even one sub-chunk
    fits, the plan stays."""
    rings = [p for p in site.decision.plan if p.schedule == "ring" and "bands" not in p.parameters]
    if len(rings) != len([p for p in site.decision.plan if p.schedule == "ring"]) or not rings:
        return
    for parts in cost_of_ring.halved(site.decision.moving.parameters["sub_chunks"]):
        cost = unrolled_nodes(site, parts)
        if cost is not None and cost <= budget:
            for piece in rings:
                piece.parameters["sub_chunks"] = parts
            return

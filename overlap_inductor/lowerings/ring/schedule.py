"""Schedule ``ring`` for a site: how it is cut, from which token count on it pays, whether its steps are unrolled or run
in one looping op."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.lowerings.ring import cost as cost_of_ring
from overlap_inductor.lowerings.ring import looped_gather as looping_gather
from overlap_inductor.lowerings.ring import looped_reduce as looping_reduce
from overlap_inductor.lowerings.ring import unrolled_gather as ring_gather
from overlap_inductor.lowerings.ring import unrolled_reduce as ring_reduce
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import GatherConsumer
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.padded_output import gathered_shape
from overlap_inductor.sites.placement import between
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.sizes import tokens
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.torch_compat.distributed import why_no_send
from overlap_inductor.torch_compat.ordering import moving_pass
from overlap_inductor.transports import routes


class RingSchedule:
    """See ``SiteSchedule``. Every legal site has a ring, unless a piece would be too small for its kind of matmul; a
    dynamic token count below the break-even runs the plain collective."""

    name = "ring"
    transports = ("p2p",)
    called = "as a ring"
    ops = tuple(f"overlap_inductor.lowerings.ring.{name}" for name in ("ops", "looped_gather_ops", "looped_reduce_ops"))
    called_by_others = False

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        no_send = why_no_send(site.facts.collective.group_name, tools.value(site.collectives[0].input).device)
        return no_send or _too_small_for_integers(site, config)

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return [PlanPiece(self.name, "p2p", (0, None), _parameters(site, config))]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        return cost_of_ring.seconds(sizes_at(site), machine_of(site), _parameters(site, config)["sub_chunks"])

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece] | Reason | None:
        if isinstance(tokens(site), int):
            return self.forced(site, config) if _pays(site, config) else None
        # The token count is only known at run time: below the break-even the looping op runs the plain collective.
        threshold = _break_even(site, config)
        if threshold is None:
            return None
        if not _chooses_at_run_time(site):
            return Reason(
                "dynamic_shape",
                f"the ring pays from about {threshold} tokens on, and this site has no op that can choose at run time",
            )
        parameters = {**_parameters(site, config), "min_rows": threshold}
        return [PlanPiece("keep", None, (0, threshold - 1)), PlanPiece(self.name, "p2p", (threshold, None), parameters)]

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[OverlapSite], config: OverlapConfig) -> None:
        fit_budget(sites, config.step_node_budget)

    def request(self, site: OverlapSite, piece: PlanPiece) -> None:
        return None

    def anchor(self, site: OverlapSite) -> None:
        return None

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        return (_unrolled if parameters["unrolled"] else _looping)(emit, site, parameters)


def _parameters(site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
    parts = config.sub_chunks
    if isinstance(site.nodes, GatherNodes):
        lead = ring_gather.leading_atom(site.nodes)
        parts = part_count(lead.size, parts) if lead is not None and ring_gather.can_cut(site.nodes) else 1
        return {"sub_chunks": parts, "route": "ring" if config.ring_direction == "unidirectional" else "bidirectional"}
    if site.facts.pattern == "matmul_all_gather":
        return {"sub_chunks": part_count(gathered_shape(site.nodes)[0], parts), "route": "broadcast"}
    parts = part_count(site.nodes.sharded.chunk, parts)
    travels = config.numerics == "allow_hop_rounding" and site.facts.pattern == "matmul_reduce_scatter"
    return {"sub_chunks": parts, "route": "travel" if travels else "owner"}


def _too_small_for_integers(site: OverlapSite, config: OverlapConfig) -> str | None:
    """``_int_mm`` on a GPU takes more than 16 rows, and multiples of 8 of the other two sizes: so must every piece."""
    parts, world_size = _parameters(site, config)["sub_chunks"], site.facts.collective.world_size
    for i, (matmul, facts) in enumerate(zip(site.matmuls, site.facts.matmuls, strict=True)):
        if matmul.kind != "int_mm" or not tools.value(matmul.lhs).is_cuda:
            continue
        sizes = {"M": facts.m, "N": facts.n, "K": facts.k}
        if not all(isinstance(size, int) for size in sizes.values()):
            return (
                f"{matmul.node.name} multiplies int8 of sizes that are only known when it runs: its pieces may be too"
                " small"
            )
        nodes = site.nodes
        crossed = ring_gather.crossed_role(nodes, nodes.consumers[i]) if isinstance(nodes, GatherNodes) else None
        ranks = 1 if site.facts.pattern == "matmul_all_gather" else world_size
        cuts = {crossed: parts, facts.role: ranks} if crossed is not None else {facts.role: ranks * parts}
        for role, count in cuts.items():
            size: Any = sizes.get(role or "", 0)
            smallest = [size // count]
            if site.facts.pattern == "matmul_all_reduce" and size % world_size:
                # (Rows that the ranks do not divide are multiplied by themselves.)
                smallest.append(size % world_size)
            if role == "M" and min(smallest) <= 16 or role in ("N", "K") and size % (8 * count):
                shape = " x ".join(str(sizes[r]) for r in "MNK")
                must = "have more than 16 rows, and so must what is left over" if role == "M" else "be a multiple of 8"
                text = f"on a GPU each of {count} pieces of {role} must {must}"
                return f"{matmul.node.name} multiplies int8 of {shape} (M x N x K): {text}"
    return None


def _pays(site: OverlapSite, config: OverlapConfig, scale: float = 1.0) -> bool:
    parts = _parameters(site, config)["sub_chunks"] if scale == 1.0 else config.sub_chunks
    return cost_of_ring.pays(sizes_at(site, scale), machine_of(site), parts)


def _break_even(site: OverlapSite, config: OverlapConfig) -> int | None:
    """The smallest power-of-two token count at which the ring is estimated to pay, or ``None`` up to 2**20 tokens."""
    example = max(hint(tokens(site)), 1)
    return next((2**exponent for exponent in range(21) if _pays(site, config, 2**exponent / example)), None)


def _unrolled(emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
    parts, route, nodes = parameters["sub_chunks"], parameters["route"], site.nodes
    if isinstance(nodes, GatherNodes):
        gathered, results = ring_gather.rewrite(emit, nodes, parts, route)
        return emit.chain, {**results, nodes.collective.wait: gathered, nodes.collective.node: gathered}
    if site.facts.pattern == "matmul_reduce_scatter":
        result = ring_reduce.rewrite_reduce_scatter(emit, nodes, parts, route)
    elif site.facts.pattern == "matmul_all_reduce":
        result = ring_reduce.rewrite_all_reduce(emit, nodes, parts)
    else:
        result = ring_reduce.rewrite_gathered_output(emit, nodes, parts)
    return emit.chain, looping.reduced(nodes, result)


def _looping(emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
    parts, floor = parameters["sub_chunks"], parameters.get("min_rows", 0)
    if isinstance(site.nodes, GatherNodes):
        return looping_gather.rewrite(emit, site.nodes, parts, floor, parameters["route"])
    return looping_reduce.rewrite(emit, site, parts, floor)


def _nodes_a_piece(consumer: GatherConsumer) -> int:
    """The matmul and a view or two; of a split contraction the other operand is cut, and what is narrower than the sum
    is widened."""
    narrow = consumer.role == "K" and tools.dtype(consumer.matmul.node).itemsize < 4
    short = consumer.role == "K" and consumer.sharded.short
    return {"M": 2, "N": 3, "K": 4, "B": 3}[consumer.role] + (2 if narrow else 0) + (3 if short else 0)


def _in_eights(nodes: Iterable[fx.Node]) -> int:
    """How many ops ``nodes`` compute besides matmuls, in whole eights: a bias, a cast or padding that one rank has and
    others have not must not change what is unrolled."""
    return sum(tools.is_pointwise(n) and n.target not in tools.SAME for n in nodes) // 8 * 8


def unrolled_nodes(site: OverlapSite) -> int:
    """About how many FX nodes the site's unrolled steps take: the same number on every rank, whatever each of them
    computes for itself."""
    assert site.decision is not None
    piece = site.decision.moving
    parts, world_size = piece.parameters["sub_chunks"], site.facts.collective.world_size
    if isinstance(site.nodes, GatherNodes):
        hops = routes.hop_count(piece.parameters["route"], world_size, parts)
        ahead = [n for n in between(site.nodes) if n not in site.nodes.through]
        computed = _in_eights([*ahead, *site.nodes.epilogue.nodes])
        return (
            4 + hops + ((world_size - 1) * parts + 1) * (2 + sum(map(_nodes_a_piece, site.nodes.consumers)) + computed)
        )
    nodes = site.nodes
    own = (n for n in nodes.layouts if n not in nodes.through and n not in nodes.externals)
    region = len(nodes.leaves) + _in_eights(own)
    if site.facts.pattern == "matmul_all_gather":
        return 4 + parts * (2 + region)
    region += len(nodes.leaves) - 1
    legs = 2 if site.facts.collective.kind == "all_reduce" else 1
    return 8 + world_size * parts * (3 + 2 * region) + legs * parts * 6


def _loopable(site: OverlapSite) -> bool:
    """Whether a looping op computes this site."""
    return (
        looping_gather.forms_of(site.nodes) is not None
        if isinstance(site.nodes, GatherNodes)
        else looping_reduce.computes(site.facts.pattern, site.nodes)
    )


def _chooses_at_run_time(site: OverlapSite) -> bool:
    if isinstance(site.nodes, GatherNodes):
        return looping_gather.chooses_at_run_time(site.nodes)
    return looping_reduce.chooses_at_run_time(site.facts.pattern, site.nodes)


def fit_budget(rings: list[OverlapSite], budget: int) -> None:
    """Unroll rings in graph order while their nodes fit the graph's ``budget``; the others become looping ops.

    Those that no looping op computes come first, since they would be kept: their decision is replaced where even that
    does not help. None is unrolled where Inductor moves nodes behind the pass. Reads what all ranks know alike, so all
    ranks unroll the same sites.
    """
    mover = moving_pass()
    loopable = {s.facts.id: _loopable(s) for s in rings}
    left = budget
    for site in sorted(rings, key=lambda s: loopable[s.facts.id]):
        decision, cost = site.decision, unrolled_nodes(site)
        assert decision is not None
        dynamic = any("min_rows" in p.parameters for p in decision.plan)
        unroll = cost <= left and not dynamic and mover is None
        if not unroll and not loopable[site.facts.id]:
            if mover is None:
                reason = Reason(
                    "too_many_steps",
                    f"its steps would add about {cost} nodes, {left} are left of the graph's budget of {budget}, and no"
                    " looping op computes it",
                )
            else:
                reason = Reason(
                    "moving_pass",
                    f"torch._inductor.config.{mover} moves nodes without regard to what steps write in place, and no"
                    " looping op computes it",
                )
            site.decision = Decision("refused", decision.source, [PlanPiece("keep")], [reason])
            continue
        left -= cost if unroll else 0
        for piece in decision.plan:
            if piece.schedule == "ring":
                piece.parameters["unrolled"] = unroll

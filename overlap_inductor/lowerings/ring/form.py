# SPDX-License-Identifier: Apache-2.0
"""``RingForm``: the interface through which the ring cuts and writes a site.

There is one implementation for each subclass of ``SiteNodes``: ``GatherRing`` and ``ReduceRing``. A form cuts a site
into pieces and writes its steps, unrolled into the graph or as one looping op::

    unrolled    for each piece: an op that waits for and starts transfers, and the mm of the piece
    looping     overlap_inductor::<pattern>(chain, shard, ...)       one op, which loops over the pieces
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from typing import Protocol

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.one_op import reduce_rows
from overlap_inductor.lowerings.ring import gather_cuts
from overlap_inductor.lowerings.ring import looped_gather
from overlap_inductor.lowerings.ring import looped_reduce
from overlap_inductor.lowerings.ring import unrolled_gather
from overlap_inductor.lowerings.ring import unrolled_reduce
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.nodes import by_nodes
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.transports import routes


class RingForm(Protocol):
    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        """The plan's parameters ``sub_chunks``, the number of parts of each shard, and ``route``, the route of shards
        or partial sums (``transports.routes``)."""
        ...

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        """``{role: pieces}``: into how many pieces each cut dim of matmul ``index`` is cut. ``parts``: sub-chunks of a
        shard."""
        ...

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        """Estimated number of FX nodes that the unrolled steps add. The number of pointwise ops may differ between
        ranks, so they are counted in multiples of 8 (see ``schedule.fit_budget``)."""
        ...

    def loopable(self, site: OverlapSite) -> bool:
        """Whether a looping op computes this site."""
        ...

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """Whether a looping op computes this site and can run the plain collective when there are few tokens."""
        ...

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        """Write the site as unrolled steps. Returns as ``SiteSchedule.rewrite``."""
        ...

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        """Write the site as one looping op. Returns as ``SiteSchedule.rewrite``. ``floor``: below this token count, the
        op runs the plain collective instead of the ring."""
        ...

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """``ExchangeTerms.cut`` for shards of ``parts`` sub-chunks. ``unrolled``: whether the steps are unrolled."""
        ...


class GatherRing:
    """See ``RingForm``. Shards travel round the ring. Each rank multiplies each shard when it arrives."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        nodes = nodes_of(site, GatherNodes)
        lead = gather_cuts.leading_atom(nodes)
        cuts = lead is not None and gather_cuts.can_cut(nodes)
        parts = part_count(lead.size, config.sub_chunks) if lead is not None and cuts else 1
        return {"sub_chunks": parts, "route": "ring" if config.ring_direction == "unidirectional" else "bidirectional"}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        nodes, ranks = nodes_of(site, GatherNodes), site.facts.collective.world_size
        consumer = nodes.consumers[index]
        crossed = gather_cuts.crossed_role(nodes, consumer)
        return {consumer.role: ranks * parts} if crossed is None else {crossed: parts, consumer.role: ranks}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, GatherNodes), site.facts.collective.world_size
        hops = routes.hop_count(route, world_size, parts)
        ahead = [n for n in nodes.between() if n not in nodes.through]
        computed = _in_eights([*ahead, *nodes.epilogue.nodes])
        return 4 + hops + ((world_size - 1) * parts + 1) * (2 + sum(map(_nodes_a_piece, nodes.consumers)) + computed)

    def loopable(self, site: OverlapSite) -> bool:
        return looped_gather.forms_of(nodes_of(site, GatherNodes)) is not None

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return looped_gather.chooses_at_run_time(nodes_of(site, GatherNodes))

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, GatherNodes)
        gathered, results = unrolled_gather.rewrite(emit, nodes, parts, route)
        return emit.chain, {**results, nodes.collective.wait: gathered, nodes.collective.node: gathered}

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        return looped_gather.rewrite(emit, nodes_of(site, GatherNodes), parts, floor, route)

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """The number of rows of a shard that are cut into sub-chunks; ``None`` if there is one sub-chunk."""
        nodes = nodes_of(site, GatherNodes)
        if parts == 1:
            return None
        forms, lead = None if unrolled else looped_gather.forms_of(nodes), gather_cuts.leading_atom(nodes)
        if forms is not None:
            return [looped_gather.shard_shape(nodes, forms)[0]], ""
        return [] if lead is None else [lead.size], ""


class ReduceRing:
    """See ``RingForm``. Each piece is sent once it is computed: to the rank that sums it (route ``owner``), to the next
    rank (``travel``), or to all ranks (``broadcast``)."""

    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        nodes = nodes_of(site, ReduceNodes)
        if site.facts.pattern == "matmul_all_gather":
            return {"sub_chunks": part_count(nodes.padded_shape[0], config.sub_chunks), "route": "broadcast"}
        travels = config.numerics == "allow_hop_rounding" and site.facts.pattern == "matmul_reduce_scatter"
        parts = part_count(nodes.sharded.chunk, config.sub_chunks)
        return {"sub_chunks": parts, "route": "travel" if travels else "owner"}

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        ranks = 1 if site.facts.pattern == "matmul_all_gather" else site.facts.collective.world_size
        return {site.facts.matmuls[index].role: ranks * parts}

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int:
        nodes, world_size = nodes_of(site, ReduceNodes), site.facts.collective.world_size
        own = (n for n in nodes.layouts if n not in nodes.through and n not in nodes.externals)
        region = len(nodes.leaves) + _in_eights(own)
        if site.facts.pattern == "matmul_all_gather":
            return 4 + parts * (2 + region)
        region += len(nodes.leaves) - 1
        legs = 2 if site.facts.collective.kind == "all_reduce" else 1
        return 8 + world_size * parts * (3 + 2 * region) + legs * parts * 6

    def loopable(self, site: OverlapSite) -> bool:
        return looped_reduce.computes(site.facts.pattern, nodes_of(site, ReduceNodes))

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return looped_reduce.chooses_at_run_time(site.facts.pattern, nodes_of(site, ReduceNodes))

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, ReduceNodes)
        if site.facts.pattern == "matmul_reduce_scatter":
            result = unrolled_reduce.rewrite_reduce_scatter(emit, nodes, parts, route)
        elif site.facts.pattern == "matmul_all_reduce":
            result = unrolled_reduce.rewrite_all_reduce(emit, nodes, parts)
        else:
            result = unrolled_reduce.rewrite_gathered_output(emit, nodes, parts)
        return emit.chain, reduce_rows.reduced(nodes, result)

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        return looped_reduce.rewrite(emit, site.facts.pattern, nodes_of(site, ReduceNodes), parts, floor)

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """As ``SiteNodes.cut``. The text also says if a looping op moves the rows of a reduction to the front before it
        cuts them."""
        nodes = nodes_of(site, ReduceNodes)
        sizes, words = nodes.cut()
        outer = nodes.sharded.outer
        in_front = isinstance(outer, int) and outer == 1 and nodes.sharded.dim == 0
        if unrolled or in_front or site.facts.pattern == "matmul_all_gather":
            return sizes, words
        return sizes, f"{words} rows in front"


FORMS: dict[type[SiteNodes], RingForm] = {GatherNodes: GatherRing(), ReduceNodes: ReduceRing()}


def form_of(site: OverlapSite) -> RingForm:
    """The form for the class of ``site.nodes``. Raises ``TypeError`` if there is none."""
    return by_nodes(FORMS, site)


def _nodes_a_piece(consumer: GatherConsumer) -> int:
    """Estimated number of nodes for the matmul of one piece: the matmul and one or two views. If the contraction is
    split, more nodes cut the other operand, widen a sum that is narrower than fp32, and zero the padding of short
    shards."""
    narrow = consumer.role == "K" and tools.dtype(consumer.matmul.node).itemsize < 4
    short = consumer.role == "K" and consumer.sharded.short
    return {"M": 2, "N": 3, "K": 4, "B": 3}[consumer.role] + (2 if narrow else 0) + (3 if short else 0)


def _in_eights(nodes: Iterable[fx.Node]) -> int:
    """The number of pointwise ops among ``nodes``, rounded down to a multiple of 8. A bias, a cast or padding may exist
    on one rank only. Rounding makes it unlikely that such an op changes which sites a rank unrolls or refuses."""
    return sum(tools.is_pointwise(n) and n.target not in tools.SAME for n in nodes) // 8 * 8

# SPDX-License-Identifier: Apache-2.0
"""``RingForm``: the interface through which the ring cuts and writes a kind of site (``FORMS``), in one of two ways::

    unrolled    for each piece: an op that waits for and starts transfers, and the mm of the piece
    looping     overlap_inductor::<pattern>(chain, shard, ...)       one op, which loops over the pieces

``parts``: sub-chunks of a shard. ``route``: the route of shards or partial sums (``transports.routes``).
"""

from __future__ import annotations

from typing import Any
from typing import Protocol

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.ring.attention_form import AttentionRing
from overlap_inductor.lowerings.ring.banded_form import BandedRing
from overlap_inductor.lowerings.ring.exchange_form import ReceivedRing
from overlap_inductor.lowerings.ring.exchange_form import SentRing
from overlap_inductor.lowerings.ring.experts_form import ExpertsRing
from overlap_inductor.lowerings.ring.gather_form import GatherRing
from overlap_inductor.lowerings.ring.reduce_form import ReduceRing
from overlap_inductor.lowerings.ring.table_form import GradientRing
from overlap_inductor.lowerings.ring.table_form import PooledRing
from overlap_inductor.lowerings.ring.uneven_form import UnevenReceivedRing
from overlap_inductor.lowerings.ring.uneven_form import UnevenSentRing
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites.attention_nodes import AttentionNodes
from overlap_inductor.sites.banded_nodes import BandedNodes
from overlap_inductor.sites.dispatched_nodes import DispatchedNodes
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.lookup_nodes import GradientNodes
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.nodes import by_nodes
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.uneven_nodes import UnevenReceivedNodes
from overlap_inductor.sites.uneven_nodes import UnevenSentNodes


class RingForm(Protocol):
    def parameters(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        """The plan's parameters: ``sub_chunks`` (``parts``) and ``route``. If the ring must not be unrolled, there is
        also ``min_rows``: the argument ``floor`` for the method ``looping``, which may be 0."""
        ...

    def counts(self, site: OverlapSite, index: int, parts: int) -> dict[str | None, int]:
        """``{role: pieces}``: the number of pieces into which the dim with this role is cut, for each cut dim of
        ``site.matmuls[index]``. A role is M, N, K or B, or ``None`` for lookups in tables."""
        ...

    def unrolled_nodes(self, site: OverlapSite, parts: int, route: str) -> int | None:
        """Estimated number of FX nodes that the unrolled steps add; ``None`` if only a looping op can compute the site.
        The number of pointwise ops is rounded down to a multiple of 8 (why: ``gather_form.in_eights``)."""
        ...

    def loopable(self, site: OverlapSite) -> bool:
        """Whether a looping op computes this site."""
        ...

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """Whether a looping op computes this site and can run the plain collective for few tokens."""
        ...

    def unrolled(self, emit: StepEmitter, site: OverlapSite, parts: int, route: str) -> tuple[fx.Node, Replaced]:
        """Write the site as unrolled steps. Returns what ``SiteSchedule.rewrite`` returns."""
        ...

    def looping(
        self, emit: StepEmitter, site: OverlapSite, parts: int, route: str, floor: int
    ) -> tuple[fx.Node, Replaced]:
        """Write the site as one looping op. Below ``floor`` tokens, the op runs the plain collective."""
        ...

    def cut(self, site: OverlapSite, parts: int, unrolled: bool) -> tuple[list[Size], str] | None:
        """``(sizes of the dims that are cut for the transfer, words that follow the sizes in the text that ranks
        compare)``. ``None`` if nothing is cut (``ExchangeTerms.cut``)."""
        ...


FORMS: dict[type[SiteNodes], RingForm] = {
    GatherNodes: GatherRing(),
    ReduceNodes: ReduceRing(),
    SentNodes: SentRing(),
    BandedNodes: BandedRing(),
    ReceivedNodes: ReceivedRing(),
    UnevenSentNodes: UnevenSentRing(),
    UnevenReceivedNodes: UnevenReceivedRing(),
    DispatchedNodes: ExpertsRing(),
    PooledNodes: PooledRing(),
    GradientNodes: GradientRing(),
    AttentionNodes: AttentionRing(),
}


def form_of(site: OverlapSite) -> RingForm:
    """The form for the class of ``site.nodes``. Raises ``TypeError`` if there is none."""
    return by_nodes(FORMS, site)

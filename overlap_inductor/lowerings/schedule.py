"""``SiteSchedule``: what the planner and the rewriter know of a schedule. One implementation a schedule, all of them in
``lowerings.registry``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.step_emitter import StepEmitter

Replaced = dict[fx.Node, fx.Node]


class SiteSchedule(Protocol):
    """A schedule, as a site is planned and rewritten with it."""

    @property
    def name(self) -> str:
        """As in the configuration; ``transports`` likewise."""
        ...

    @property
    def transports(self) -> tuple[str, ...]: ...

    @property
    def called(self) -> str:
        """The schedule in a sentence, behind "estimated 12 us"."""
        ...

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the modules that define its ops; nothing else imports them."""
        ...

    @property
    def called_by_others(self) -> bool:
        """Whether its all-reduce op takes no more than ``settings`` of its plan, so that another schedule's op can call
        it for token counts that it does not serve itself."""
        ...

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        """Why it does not compute this (legal) site under this configuration, or ``None``."""
        ...

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        """What it runs where it was asked for by name, wherever it can; without estimates."""
        ...

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        """Estimated seconds at the example's token count."""
        ...

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece] | Reason | None:
        """What it runs for which token counts where that is estimated to pay; else why it cannot be chosen, or ``None``
        where it is just too slow."""
        ...

    def joined(
        self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]
    ) -> list[PlanPiece] | None:
        """A plan for a dynamic token count in which this schedule serves those counts that it is made for, and the
        first of ``others`` (plans of schedules that are ``called_by_others``) the rest. ``None`` where it joins none.
        """
        ...

    def fit(self, sites: list[OverlapSite], config: OverlapConfig) -> None:
        """Have the ``sites`` of a graph that are decided for it keep to what the graph has room for."""
        ...

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        """The workspace that ``piece`` of a site's plan, of this schedule, needs; or ``None``."""
        ...

    def anchor(self, site: OverlapSite) -> fx.Node | None:
        """The node before which a reducing site decided for this schedule is written where that is not its collective,
        or ``None``."""
        ...

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        """Write a site decided for this schedule into the graph: ``(next token of the group's chain, what replaces
        which node)``."""
        ...

"""``SiteSchedule``: what the planner and the rewriter know of a schedule. One implementation a schedule, all of them in ``passes.schedules``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from typing import Protocol

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.passes.site_nodes import OverlapSite
from overlap_inductor.passes.steps import StepEmitter
from overlap_inductor.schedule import PlanPiece
from overlap_inductor.schedule import Reason
from overlap_inductor.transports.arena import Request

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
        """What it runs for which token counts where that is estimated to pay; else why it cannot be chosen, or ``None`` where it is just too slow."""
        ...

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        """The workspace that ``piece`` of a site's plan, of this schedule, needs; or ``None``."""
        ...

    def anchor(self, site: OverlapSite) -> fx.Node | None:
        """The node before which a reducing site decided for this schedule is written where that is not its collective, or ``None``."""
        ...

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        """Write a site decided for this schedule into the graph: ``(next token of the group's chain, what replaces which node)``."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""``SiteSchedule``: the interface through which the planner and the rewriter use a schedule.

Each schedule has one implementation. ``lowerings.registry`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.step_emitter import StepEmitter

Replaced = dict[fx.Node, fx.Node]


@dataclass(frozen=True)
class ExchangeTerms:
    """What both ends of a transfer must do alike, besides the collective's own shape (``passes.agreed_plan``).

    Attributes:
        parameters: the parameters of a plan's piece that both ends must share.
        cut: ``(sizes, words)`` of what is cut for the transfer; ``None`` if it is sent whole.
        computes_ahead: whether the nodes of ``SiteNodes.computed_ahead`` are computed before data is sent.
    """

    parameters: Mapping[str, Any]
    cut: tuple[list[Size], str] | None
    computes_ahead: bool


@dataclass(frozen=True)
class OpCall:
    """One call of a schedule's op without a graph: ``a [rows, inner] @ b [inner, columns]`` beside a collective.

    Attributes:
        tokens: rows of the whole tensor: after a gather, or before a scatter.
        dtype: the operands' dtype.
        sent: the dtype of the elements that the collective moves.
        scaled: whether the operands are fp8 with scales.
    """

    pattern: str
    ranks: tuple[int, ...]
    tokens: int
    inner: int
    columns: int
    dtype: torch.dtype
    sent: torch.dtype
    scaled: bool

    @property
    def shard_rows(self) -> int:
        return -(-self.tokens // len(self.ranks))


class SingleOp(Protocol):
    """A schedule that writes each site as one op, which can also be called without a graph.

    The op is ``overlap_inductor::<schedule>_<pattern>``, or ``..._scaled_<pattern>`` for fp8. Its arguments are the
    operands, as in ``lowerings.one_op.ops``, then the settings as JSON text.
    """

    @property
    def parameters(self) -> type:
        """The dataclass whose fields the settings may set."""
        ...

    def why_no_call(self, call: OpCall, transport: str, device: torch.device) -> str | None:
        """Why the op cannot compute ``call`` over ``transport`` (empty: any transport); ``None`` if it can. The answer
        is the same on all ranks."""
        ...

    def settings_of(self, call: OpCall, transport: str) -> dict[str, Any]:
        """The settings that the planner would choose for a site like ``call``."""
        ...

    def request_of(self, call: OpCall, settings: str, site: str) -> Request | None:
        """The workspace that ``call`` needs with ``settings`` (JSON text); ``None`` if it needs none."""
        ...


class SiteSchedule(Protocol):
    """A way to overlap a site: it says which sites it computes, estimates their time, plans and rewrites them."""

    @property
    def name(self) -> str:
        """The name that ``OVERLAP_INDUCTOR_SCHEDULE`` and reports use."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that may move its bytes, as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
        ...

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the patterns that it computes. The other methods are called with sites of these patterns only."""
        ...

    @property
    def noun(self) -> str:
        """What computes a site, to stand after "a" or "no": "fused kernel"."""
        ...

    @property
    def called(self) -> str:
        """The schedule in a sentence, to stand after "estimated 12 us": "in a fused kernel"."""
        ...

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the modules that define its ops. ``registry.define_ops`` imports them."""
        ...

    @property
    def called_by_others(self) -> bool:
        """Whether another schedule's op can call its all-reduce op for token counts that the other does not serve. The
        plan must then need no parameter but ``settings``."""
        ...

    @property
    def single_op(self) -> SingleOp | None:
        """The interface to the schedule's op if each site is one op; else ``None``."""
        ...

    @property
    def holds_workspace(self) -> bool:
        """Whether its sites hold symmetric memory, so that ``request`` may return one."""
        ...

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        """Why the schedule cannot run between these global ranks with tensors on ``device``, whatever the site;
        ``None`` if it can. The answer is the same on all ranks. The doctor shows it."""
        ...

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        """Why the schedule cannot compute this legal site under ``config``; ``None`` if it can."""
        ...

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        """The plan if the user names the schedule: it runs for all token counts that it can serve. No estimate is
        used."""
        ...

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        """Estimated seconds at the example's token count."""
        ...

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece] | Reason | None:
        """The plan with the token counts at which the schedule is estimated to pay. A ``Reason`` if it pays but cannot
        be chosen; ``None`` if it never pays."""
        ...

    def joined(
        self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]
    ) -> list[PlanPiece] | None:
        """A plan for a dynamic token count that joins this schedule's plan ``own`` with the first of ``others``. The
        other schedule serves the token counts that this one does not. ``others``: plans of schedules that are
        ``called_by_others``. ``None`` if this schedule does not join plans."""
        ...

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Change the decisions of ``sites``, all sites of a graph decided for this schedule, so that they keep within
        the graph's budget."""
        ...

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        """The workspace that ``piece``, a piece of this schedule in the site's plan, needs; ``None`` if it needs
        none."""
        ...

    def anchor(self, site: DecidedSite) -> fx.Node | None:
        """The node before which a reducing site is written; ``None`` for the site's collective."""
        ...

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        """The terms of ``piece``, a piece of this schedule in the site's plan, that ranks compare before they
        exchange."""
        ...

    def rewrite(self, emit: StepEmitter, site: DecidedSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        """Write the site into the graph. Returns ``(next token of the group's chain, {old node: its replacement})``."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""``SiteSchedule``: the interface through which the planner and the rewriter use a schedule."""

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
"""``{old node: its replacement}``."""


@dataclass(frozen=True)
class ExchangeTerms:
    """What the ranks of a transfer must agree on, besides the collective's own shape (``passes.agreed_plan``).

    Attributes:
        parameters: the parameters of a plan's piece that must be the same on all ranks.
        cut: ``(sizes of the dims that are cut for the transfer, text)``; ``None`` if nothing is cut. In the plan that
            ranks compare, the text follows the sizes, for example ``" on dim 0"``.
        computes_ahead: whether the nodes of ``SiteNodes.computed_ahead`` are computed before data is sent.
    """

    parameters: Mapping[str, Any]
    cut: tuple[list[Size], str] | None
    computes_ahead: bool


@dataclass(frozen=True)
class OpCall:
    """One call of a schedule's op without a graph: ``a [rows, inner] @ b [inner, columns]`` with a collective.

    Attributes:
        pattern: the site's pattern, e.g. ``all_gather_matmul``.
        ranks: global ranks of the group.
        tokens: rows of the whole tensor, that is, after a gather or before a scatter.
        dtype: the operands' dtype.
        sent: the dtype that the collective moves.
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
        """Rows of one rank's shard, rounded up."""
        return -(-self.tokens // len(self.ranks))


class SingleOp(Protocol):
    """A schedule whose op can also be called without a graph. Each of its sites is one op.

    The op is ``overlap_inductor::<schedule>_<pattern>``, or ``..._scaled_<pattern>`` for fp8. Its arguments are the
    operands, as in ``lowerings.one_op.ops``, then the settings as JSON text.
    """

    @property
    def parameters(self) -> type:
        """The dataclass of the settings."""
        ...

    def why_no_call(self, call: OpCall, transport: str, device: torch.device) -> str | None:
        """Why the op cannot compute ``call`` over ``transport`` (empty: any transport), or ``None``. The answer is
        the same on all ranks."""
        ...

    def settings_of(self, call: OpCall, transport: str) -> dict[str, Any]:
        """The settings that the planner would choose for a site like ``call``."""
        ...

    def request_of(self, call: OpCall, settings: str, site: str) -> Request | None:
        """The workspace that ``call`` needs with ``settings`` (JSON text), or ``None``."""
        ...


class SiteSchedule(Protocol):
    """A way to overlap a site: says which sites it computes, estimates their time, plans and rewrites them."""

    @property
    def name(self) -> str:
        """The name that ``OVERLAP_INDUCTOR_SCHEDULE`` and reports use."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that may move the schedule's bytes."""
        ...

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the patterns that the schedule computes. Its methods get sites of these patterns only."""
        ...

    @property
    def noun(self) -> str:
        """A noun such as "fused kernel". Texts use it after "a" or "no"."""
        ...

    @property
    def called(self) -> str:
        """How the schedule runs, such as "in a fused kernel". Texts use it after a time: "12 us in a fused kernel"."""
        ...

    @property
    def ops(self) -> tuple[str, ...]:
        """The modules that define the schedule's ops. ``registry.define_ops`` imports them."""
        ...

    @property
    def called_by_others(self) -> bool:
        """Whether another schedule's op can call this schedule's all-reduce op, for token counts that the other
        schedule does not serve. The call passes only one parameter of the plan: ``settings``."""
        ...

    @property
    def single_op(self) -> SingleOp | None:
        """The interface to the schedule's op if each site is one op; else ``None``."""
        ...

    @property
    def holds_workspace(self) -> bool:
        """Whether the schedule's sites hold symmetric memory. If not, ``request`` returns ``None``."""
        ...

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        """Why the schedule cannot run between these global ranks on ``device``, or ``None``. The answer is the same on
        all ranks. The command ``doctor`` shows it."""
        ...

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        """Why the schedule cannot compute ``site``, or ``None``. ``site`` has passed ``passes.check``."""
        ...

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        """The plan if the user names the schedule. The plan serves all token counts that the schedule can serve, not
        only those at which the schedule pays."""
        ...

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        """Estimated seconds of the site at the token count of the example inputs."""
        ...

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        """A plan for the token counts at which the schedule is estimated to pay. A ``Reason`` if the schedule cannot
        be chosen, although it pays or may pay; ``None`` if it never pays. ``fewest``: if the schedule's op
        chooses by the token count, the plan keeps the site at smaller counts."""
        ...

    def joined(
        self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]
    ) -> list[PlanPiece] | None:
        """A plan for a dynamic token count. ``own``: this schedule's plan. ``others``: plans of schedules that are
        ``called_by_others``. If ``own`` does not serve a count, the first plan in ``others`` may serve it. ``None`` if
        this schedule does not join plans."""
        ...

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Change decisions so that the rewrites fit the graph's budget of nodes. ``sites``: the graph's sites for this
        schedule."""
        ...

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        """The workspace that ``piece`` needs, or ``None``. ``piece``: a piece of the site's plan for this schedule."""
        ...

    def anchor(self, site: DecidedSite) -> fx.Node | None:
        """The node before which the site's steps are written if no node has to move (``SiteNodes.places``). ``None``:
        the site's last collective."""
        ...

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        """What the ranks compare before they exchange data for ``piece``, a piece of the site's plan for this
        schedule."""
        ...

    def rewrite(self, emit: StepEmitter, site: DecidedSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        """Write the site into the graph. Returns ``(next token of the group's chain, {old node: its replacement})``."""
        ...

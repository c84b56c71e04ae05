# SPDX-License-Identifier: Apache-2.0
"""``OneOpSchedule``: a schedule that writes each site as one op, ``overlap_inductor::<schedule>_<pattern>``.

Limits of such an op:

- The matrices are fp16 or bf16, with rows of whole 16-byte words (K and N are multiples of 8).
- The rows can be brought into the ranks' order (``lowerings.rows``), and the ranks' parts have equal sizes.
- A reduction has one matmul. A gather may have several. Matmuls that ``form.served`` does not select read the gathered
  tensor that the op returns.
- No matmul that the op computes contracts the gathered or exchanged dim.
- Only the token count may be dynamic.

A schedule may have more ops, each of which lifts a limit:

- ``<schedule>_scaled_<pattern>``: fp8 matmuls with scales (``lowerings.one_op.scaled``).
- ``<schedule>_sum_<pattern>``: a reduction of a sum of matmuls.
- ``<schedule>_contracted_all_to_all_matmul``: plain matmuls that contract the exchanged dim.

Parameters, workspace and further limits are in the schedule's plan module, e.g. ``lowerings.fused.parameters``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.one_op import scaled as scaled_site
from overlap_inductor.lowerings.one_op.form import chooses_at_run_time
from overlap_inductor.lowerings.one_op.form import form_of
from overlap_inductor.lowerings.one_op.form import loopable
from overlap_inductor.lowerings.one_op.form import served
from overlap_inductor.lowerings.one_op.operands import right_operand_fits
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import SCALED
from overlap_inductor.lowerings.rows import overlap
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import OpCall
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.lowerings.schedule import SingleOp
from overlap_inductor.runtime.arena import Need
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import symmetric

WhyNot = Callable[[torch.dtype, int, int], str | None]


class OpPlan(Protocol):
    """What a schedule's plan module must have. No function uses a GPU."""

    def why_not(self, dtype: torch.dtype, inner: int, columns: int) -> str | None:
        """Why the op cannot compute ``a [rows, inner] @ b [inner, columns]``; ``None`` if it can."""
        ...

    def transports_of(self, pattern: str) -> tuple[str, ...]:
        """The transports that the user may choose for ``pattern``."""
        ...

    def automatic(self, pattern: str) -> tuple[str, ...]:
        """The transports from which the op chooses at each call if the user chose none."""
        ...

    def settings_for(self, pattern: str, transport: str) -> dict[str, Any]:
        """The op's settings for the plan. ``transport``: as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
        ...

    def parameters_of(self, settings: str, blocks: int) -> Any:
        """The op's parameters. ``settings``: a plan's settings as JSON text. ``blocks``: number of SMs of the
        device. Sizes of workspaces do not depend on ``blocks``."""
        ...


@dataclass(frozen=True)
class OneOpSchedule:
    """See ``SiteSchedule``, also for attributes that are not listed here.

    Attributes:
        plan: the schedule's plan module.
        cost: ``(sizes, machine) -> estimated seconds of a site``.
        pays: ``(sizes, machine) -> bool``: whether the schedule is estimated to be sufficiently faster than schedule
            ``keep``.
        reach: ``(ranks, device) -> why the ranks cannot run the schedule on the device``; ``None`` if they can. All
            ranks get the same answer.
        dynamic: True if the token count may be symbolic at compile time.
        needed: ``(pattern, world_size, rows of a shard, inner, columns, itemsize, parameters) -> (bytes, signals)`` of
            a call's workspace slot, and its protocol if it is not ``CREDITS``; ``None`` if the schedule needs no
            workspace.
        why_not_scaled: as ``plan.why_not``, for fp8 with scales; ``None`` if the schedule has no ops for fp8.
        only_plain: patterns for which the schedule has no op for fp8.
        replays: a repeated call may be launched as one CUDA graph (``runtime.replay``).
        sums: the schedule has ops for a reduction of a sum of plain matmuls.
        contracts: each rank's slice of a contracted dim must be a multiple of this many elements. 0: no op for
            contracted dims.
        parameters: the dataclass of the op's parameters. The settings may set its fields.
    """

    name: str
    called: str
    noun: str
    patterns: tuple[str, ...]
    plan: OpPlan
    cost: Callable[[SiteSizes, Machine], float]
    pays: Callable[[SiteSizes, Machine], bool]
    reach: Callable[[tuple[int, ...], torch.device], str | None]
    dynamic: bool = True
    needed: Callable[..., Need] | None = None
    why_not_scaled: WhyNot | None = None
    only_plain: tuple[str, ...] = ()
    replays: bool = False
    sums: bool = False
    contracts: int = 0
    parameters: type = object
    ops: tuple[str, ...] = ()
    called_by_others: bool = False

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t for pattern in self.patterns for t in self.plan.transports_of(pattern)))

    @property
    def single_op(self) -> SingleOp:
        return self

    @property
    def holds_workspace(self) -> bool:
        return self.needed is not None

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        return self.reach(ranks, device)

    def why_no_call(self, call: OpCall, transport: str, device: torch.device) -> str | None:
        moving = self.plan.transports_of(call.pattern)
        if transport and transport not in moving:
            return (
                f"schedule {self.name} cannot use transport {transport} for {call.pattern}; expected"
                f" {' or '.join(moving)}"
            )
        if call.scaled and (reason := self._why_no_scaled(call.pattern)) is not None:
            return reason
        limits = self.why_not_scaled if call.scaled and self.why_not_scaled is not None else self.plan.why_not
        return limits(call.dtype, call.inner, call.columns) or self.why_not_between(call.ranks, device)

    def settings_of(self, call: OpCall, transport: str) -> dict[str, Any]:
        return self.plan.settings_for(call.pattern, transport)

    def request_of(self, call: OpCall, settings: str, site: str) -> Request | None:
        if self.needed is None:
            return None
        sizes = call.shard_rows, call.inner, call.columns, call.sent.itemsize
        parameters = self.plan.parameters_of(settings, 1)
        return Request(site, *self.needed(call.pattern, len(call.ranks), *sizes, parameters))

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Changes no decision. A site is written as one op and few other nodes, so it hardly uses the graph's budget of
        nodes."""

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        if site.nodes.uneven_rows():
            return f"each rank's part has its own number of rows; a {self.noun} sends equal parts"
        site, facts = served(site), site.facts
        moving = self.plan.transports_of(facts.pattern)
        if config.transport not in ("auto", *moving):
            return (
                f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, but schedule {self.name} can only use"
                f" {' or '.join(moving)} for {facts.pattern}"
            )
        why_not: WhyNot = self.plan.why_not
        kinds, why_not_right, scaled = PLAIN, _why_not_right, scaled_site.is_scaled(site)
        if scaled:
            reason = self._why_no_scaled(facts.pattern) or scaled_site.why_not(site)
            if reason is not None or self.why_not_scaled is None:
                return reason
            why_not, kinds, why_not_right = self.why_not_scaled, SCALED, scaled_site.why_not_right
        if not loopable(site, kinds):
            if (between := form_of(site).computed_between(site)) is not None:
                return (
                    f"{between.name} ({between.target}) is between the matmuls and the collective; a {self.noun} cannot"
                    " compute it"
                )
            return form_of(site).why_no_contraction(site, self.noun, self.contracts) or (
                f"a {self.noun} cannot compute this site. Possible causes: rows in another order than the ranks', an"
                " unsupported op between matmul and collective, values sent as another dtype, or an unsupported matmul"
                " or bias"
            )
        if (reason := form_of(site).why_no_sum(site, self.noun, self.sums and not scaled)) is not None:
            return reason
        if (reason := form_of(site).why_no_contraction(site, self.noun, self.contracts)) is not None:
            return reason
        for left, right in operands(site):
            # Only the left operand's rows may be dynamic.
            dynamic = self.dynamic and chooses_at_run_time(site, kinds)
            static = (left.shape[1], *right.shape, *right.stride(), *(() if dynamic else left.shape))
            if any(not isinstance(size, int) for size in static):
                return (
                    f"a size or stride is only known at run time: {[str(s) for s in left.shape]} @"
                    f" {[str(s) for s in right.shape]}"
                )
            reason = why_not(left.dtype, *form_of(site).slice_sizes(site, left, right)) or why_not_right(left, right)
            if reason is not None:
                return reason
        source = tools.value(site.collectives[0].input)
        return self.why_not_between(facts.collective.ranks, source.device)

    def _why_no_scaled(self, pattern: str) -> str | None:
        if self.why_not_scaled is None:
            return f"no {self.noun} multiplies fp8 with scales"
        if pattern in self.only_plain:
            return f"no {self.noun} multiplies fp8 with scales in {pattern}"
        return None

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return self.pieces(site, config, 0)

    def settings_for(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        """The op's settings. Ranks compare them, so they must not depend on sizes that may differ between ranks."""
        return self.plan.settings_for(site.facts.pattern, config.transport)

    def pieces(self, site: OverlapSite, config: OverlapConfig, min_rows: int) -> list[PlanPiece]:
        """The plan that runs the op from ``min_rows`` tokens on. With a dynamic token count, the op's workspace is
        planned for ``config.max_tokens`` tokens. Then fewer than ``min_rows`` tokens, or more than
        ``config.max_tokens``, run ``keep``."""
        own = served(site)
        settings = self.settings_for(site, config) | ({"min_rows": min_rows} if min_rows else {})
        if config.replay == "off" and self.replays:
            settings["replays"] = False
        # With ``auto``, the op chooses a transport at each call, by the bytes that move.
        automatic = self.plan.automatic(site.facts.pattern)
        transport = " or ".join(automatic) if config.transport == "auto" else config.transport
        parameters: dict[str, Any] = {"settings": json.dumps(settings, sort_keys=True)}
        if len(own.matmuls) < len(site.matmuls):
            parameters["matmuls"] = f"{len(own.matmuls)} of {len(site.matmuls)}"
        if isinstance(own.nodes.tokens, int):
            return [PlanPiece(self.name, transport, (0, None), parameters)]
        below = [PlanPiece("keep", None, (0, min_rows - 1))] if min_rows else []
        above = PlanPiece("keep", None, (config.max_tokens + 1, None))
        return [
            *below,
            PlanPiece(
                self.name, transport, (min_rows, config.max_tokens), parameters | {"max_tokens": config.max_tokens}
            ),
            above,
        ]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        own, machine = sizes_at(served(site)), machine_of(site, config)
        behind = cost_model.matmul_seconds(sizes_at(site), machine) - cost_model.matmul_seconds(own, machine)
        return self.cost(own, machine) + behind

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        machine, own = machine_of(site, config), served(site)
        if isinstance(own.nodes.tokens, int):
            # Only calls whose tensors have the addresses of an earlier call are replayed. With a dynamic token count,
            # addresses change. So replays are assumed only for a static token count.
            sizes = replace(sizes_at(own), replays=self.replays and config.replay == "on" and not symmetric.one_queue())
            return self.forced(site, config) if self.pays(sizes, machine) else None
        example = max(hint(own.nodes.tokens), 1)
        counts = (2**exponent for exponent in range(config.max_tokens.bit_length()))
        threshold = next((n for n in counts if self.pays(sizes_at(own, n / example), machine)), None)
        if threshold is None or fewest > config.max_tokens:
            return None
        return self.pieces(site, config, max(threshold, fewest))

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        if self.needed is None:
            return None
        site = served(site)
        pattern, world_size, planned = site.facts.pattern, site.facts.collective.world_size, piece.parameters
        left, right = max(operands(site), key=lambda pair: int(pair[1].shape[1]))
        if "max_tokens" not in planned and not isinstance(left.shape[0], int):
            raise RuntimeError(f"the plan has no max_tokens, but the number of rows is symbolic: {left.shape[0]}")
        sharded = site.nodes.sharded_dims[0]
        rows = -(-(planned["max_tokens"] if "max_tokens" in planned else int(left.shape[0])) // world_size)
        if sharded.short and "max_tokens" not in planned:
            rows = sharded.outer * sharded.chunk
        parameters = self.plan.parameters_of(planned["settings"], 1)
        sent = tools.dtype(site.collectives[0].input).itemsize
        need = self.needed(pattern, world_size, max(rows, 1), int(left.shape[1]), int(right.shape[1]), sent, parameters)
        return Request(site.facts.id, *need)

    def anchor(self, site: OverlapSite) -> fx.Node | None:
        return None

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        site = served(site)
        if not scaled_site.is_scaled(site):
            return self.written(emit, site, site.facts.pattern, [], parameters["settings"])
        name, terms = f"scaled_{site.facts.pattern}", scaled_site.terms(emit, site)
        return self.written(emit, site, name, terms, parameters["settings"])

    def written(
        self, emit: StepEmitter, site: OverlapSite, name: str, scales: list[tuple[Any, ...]], *own: Any
    ) -> tuple[fx.Node, Replaced]:
        """Write the site as op ``<schedule>_<name>``, or as another op of the schedule (see the module's docstring).

        Args:
            scales: the scale arguments of each matmul (``scaled.terms``); empty for plain matmuls.
            own: the schedule's own arguments after the operands. The last one is the settings.

        Returns:
            What ``SiteSchedule.rewrite`` returns.
        """

        def op(form: str) -> Any:
            return getattr(overlap, f"{self.name}_{form}{name}").default

        return form_of(site).write(emit, site, op, scales, own)

    def exchange(self, site: OverlapSite, piece: PlanPiece) -> ExchangeTerms:
        own = ("epilogue", "matmuls")
        return ExchangeTerms({k: v for k, v in piece.parameters.items() if k not in own}, site.nodes.cut(), True)


def operands(site: OverlapSite) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(left, right)`` of each matmul as the op computes it. The op computes the transposed product if
    ``RowsForm.turns`` is true and the matmul's dim N is cut."""
    nodes, turns = site.nodes, form_of(site).turns
    return [_pair(m.lhs, m.rhs, turns and role == "N") for m, role in zip(nodes.matmuls, nodes.roles, strict=True)]


def _why_not_right(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if right.dtype != left.dtype or not right_operand_fits(right):
        return (
            f"the right operand is {right.dtype}{list(right.shape)} with strides {list(right.stride())}; expected"
            f" {left.dtype}, and rows or columns of whole 16-byte words"
        )
    return None


def _pair(lhs: fx.Node, rhs: fx.Node, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = tools.value(lhs), tools.value(rhs)
    return (right.t(), left.t()) if transposed else (left, right)

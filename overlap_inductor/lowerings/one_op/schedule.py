"""``OneOpSchedule``: a schedule whose sites are one op each, ``overlap_inductor::<schedule>_<pattern>``.

Such an op computes what a looping op computes (rows in the ranks' order, ``lowerings.one_op.rows``), of 16-bit matrices
in whole 16-byte rows; one matmul into a reduction, or a sum of several where the schedule has ops for that
(``<schedule>_sum_<pattern>``). Of the sizes only the token count may be dynamic. Of a gather's matmuls it computes
those that it can, and hands out the gathered tensor for the others. What is the schedule's own (parameters, workspace,
further limits) is in its plan module, e.g. ``lowerings.fused.parameters``. A schedule may have ops for fp8 with scales,
too: ``<schedule>_scaled_<pattern>``, ``lowerings.one_op.scaled``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from operator import getitem
from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.lowerings.one_op import scaled as scaled_site
from overlap_inductor.lowerings.one_op.operands import right_operand_fits
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.sizes import tokens
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import symmetric

WhyNot = Callable[[torch.dtype, int, int], str | None]


class OpPlan(Protocol):
    """What is planned of a schedule's op before any GPU is touched (a module of ``lowerings``)."""

    def why_not(self, dtype: torch.dtype, inner: int, columns: int) -> str | None:
        """What the op is not made for: ``a [rows, inner] @ b [inner, columns]``."""
        ...

    def transports_of(self, pattern: str) -> tuple[str, ...]:
        """What may move a pattern's bytes."""
        ...

    def settings_for(self, pattern: str, transport: str) -> dict[str, Any]:
        """Parameters of the op, as they stand in the plan; ``transport`` as it was asked for."""
        ...

    def parameters_of(self, settings: str, blocks: int) -> Any:
        """The parameters that a plan's settings (JSON text) and the device's number of SMs make."""
        ...


@dataclass(frozen=True)
class OneOpSchedule:
    """See ``SiteSchedule``.

    Attributes:
        noun: what computes a site, behind "a" or "no".
        cost: estimated seconds; pays: whether that is enough faster than ``keep``.
        reach: why ranks on a device cannot run it, from what all of them know alike, or ``None``.
        dynamic: whether the token count may be known no earlier than it runs.
        needed: ``(pattern, world_size, rows of a shard, inner, columns, itemsize, parameters) -> (bytes, signals)``
            that a call needs of its slot; ``None`` without.
        why_not_scaled: as the plan's ``why_not``, of fp8 with scales; ``None`` where the schedule has no ops for them.
        replays: whether the launches of a call may be one CUDA graph (``runtime.replay``).
        sums: whether it has ops for a sum of plain matmuls into one reduction.
        ops, called_by_others: see ``SiteSchedule``.
    """

    name: str
    transports: tuple[str, ...]
    called: str
    noun: str
    patterns: tuple[str, ...]
    plan: OpPlan
    cost: Callable[[SiteSizes, Machine], float]
    pays: Callable[[SiteSizes, Machine], bool]
    reach: Callable[[tuple[int, ...], torch.device], str | None]
    dynamic: bool = True
    needed: Callable[..., tuple[int, int]] | None = None
    why_not_scaled: WhyNot | None = None
    replays: bool = False
    sums: bool = False
    ops: tuple[str, ...] = ()
    called_by_others: bool = False

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[OverlapSite], config: OverlapConfig) -> None:
        """Its calls are one node each."""

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        site, facts = looping.served(site), site.facts
        if facts.pattern not in self.patterns:
            return f"no {self.noun} computes {facts.pattern}"
        moving = self.plan.transports_of(facts.pattern)
        if config.transport not in ("auto", *moving):
            return (
                f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, and what schedule {self.name} sends of {facts.pattern}"
                f" goes by {' or '.join(moving)}"
            )
        why_not: WhyNot = self.plan.why_not
        kinds, why_not_right = looping.PLAIN, _why_not_right
        if scaled_site.is_scaled(site):
            if self.why_not_scaled is None:
                return f"no {self.noun} multiplies fp8 with scales"
            if (reason := scaled_site.why_not(site)) is not None:
                return reason
            why_not, kinds, why_not_right = self.why_not_scaled, looping.SCALED, scaled_site.why_not_right
        if not looping.loopable(site, kinds):
            if (between := looping.computed_between(site)) is not None:
                return (
                    f"{between.name} ({between.target}) stands between its matmuls and the collective; a {self.noun}"
                    " computes nothing there"
                )
            return "its rows do not lie in the ranks' order, or its matmuls are not plain ones with a bias of one row"
        if facts.pattern != "all_gather_matmul" and len(site.matmuls) > 1:
            if not self.sums or scaled_site.is_scaled(site):
                return f"{len(site.matmuls)} matmuls are summed into one reduction; a {self.noun} has one"
            biases = [] if isinstance(site.nodes, GatherNodes) else looping.summed(site.nodes)
            if (biased := sum(b is not None for b in biases)) > 1:
                return f"{biased} of the matmuls that are summed into one reduction have a bias; a {self.noun} adds one"
            if len(dtypes := {str(tools.dtype(m.lhs)) for m in site.matmuls}) > 1:
                return f"matmuls of {' and '.join(sorted(dtypes))} are summed into one reduction; expected one dtype"
        for left, right in operands(site):
            # Of the sizes only the left operand's rows may be tokens.
            dynamic = self.dynamic and looping.chooses_at_run_time(site, kinds)
            static = (left.shape[1], *right.shape, *right.stride(), *(() if dynamic else left.shape))
            if any(not isinstance(size, int) for size in static):
                return (
                    f"a size or stride is only known when it runs: {[str(s) for s in left.shape]} @"
                    f" {[str(s) for s in right.shape]}"
                )
            reason = why_not(left.dtype, int(left.shape[1]), int(right.shape[1])) or why_not_right(left, right)
            if reason is not None:
                return reason
        source = tools.value(site.collectives[0].input)
        return self.reach(facts.collective.ranks, source.device)

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return self.pieces(site, config, 0)

    def settings_for(self, site: OverlapSite, config: OverlapConfig) -> dict[str, Any]:
        """The op's parameters, which ranks compare: a protocol between ranks rests on them and on what moves, never on
        the sizes of a rank's own matmuls."""
        return self.plan.settings_for(site.facts.pattern, config.transport)

    def pieces(self, site: OverlapSite, config: OverlapConfig, min_rows: int) -> list[PlanPiece]:
        """From ``min_rows`` tokens on, and for a dynamic count up to those that workspace is planned for."""
        own = looping.served(site)
        settings = self.settings_for(site, config) | ({"min_rows": min_rows} if min_rows else {})
        if config.replay == "off" and self.replays:
            settings["replays"] = False
        # (A schedule with several transports that are all allowed takes the one for the bytes of each call.)
        transport = " or ".join(
            t for t in self.plan.transports_of(site.facts.pattern) if config.transport in ("auto", t)
        )
        parameters: dict[str, Any] = {"settings": json.dumps(settings, sort_keys=True)}
        if len(own.matmuls) < len(site.matmuls):
            parameters["matmuls"] = f"{len(own.matmuls)} of {len(site.matmuls)}"
        if isinstance(tokens(own), int):
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
        own, machine = sizes_at(looping.served(site)), machine_of(site)
        behind = cost_model.matmul_seconds(sizes_at(site), machine) - cost_model.matmul_seconds(own, machine)
        return self.cost(own, machine) + behind

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece] | None:
        machine, own = machine_of(site), looping.served(site)
        if isinstance(tokens(own), int):
            # (A count that changes brings its tensors to other addresses.)
            sizes = replace(sizes_at(own), replays=self.replays and config.replay == "on" and not symmetric.one_queue())
            return self.forced(site, config) if self.pays(sizes, machine) else None
        example = max(hint(tokens(own)), 1)
        counts = (2**exponent for exponent in range(config.max_tokens.bit_length()))
        threshold = next((n for n in counts if self.pays(sizes_at(own, n / example), machine)), None)
        return None if threshold is None else self.pieces(site, config, threshold)

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request | None:
        if self.needed is None:
            return None
        site = looping.served(site)
        pattern, world_size, planned = site.facts.pattern, site.facts.collective.world_size, piece.parameters
        left, right = max(operands(site), key=lambda pair: int(pair[1].shape[1]))
        if "max_tokens" not in planned and not isinstance(left.shape[0], int):
            raise RuntimeError(f"{left.shape[0]} rows were planned as a number that is known")
        sharded = site.nodes.consumers[0].sharded if isinstance(site.nodes, GatherNodes) else site.nodes.sharded
        rows = -(-(planned["max_tokens"] if "max_tokens" in planned else int(left.shape[0])) // world_size)
        if sharded.short and "max_tokens" not in planned:
            rows = sharded.outer * sharded.chunk
        parameters = self.plan.parameters_of(planned["settings"], 1)
        sent = tools.dtype(site.collectives[0].input).itemsize
        need = self.needed(pattern, world_size, max(rows, 1), int(left.shape[1]), int(right.shape[1]), sent, parameters)
        return Request(site.facts.id, *need)

    def anchor(self, site: OverlapSite) -> None:
        return None

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        site = looping.served(site)
        if not scaled_site.is_scaled(site):
            return self.written(emit, site, site.facts.pattern, (), parameters["settings"])
        return self.written(
            emit, site, f"scaled_{site.facts.pattern}", scaled_site.terms(emit, site), parameters["settings"]
        )

    def written(
        self, emit: StepEmitter, site: OverlapSite, name: str, scales: tuple[Any, ...], *own: Any
    ) -> tuple[fx.Node, Replaced]:
        """The site as op ``<schedule>_<name>``, whose own arguments (its settings the last of them) stand behind the
        operands."""
        op, where = getattr(looping.overlap, f"{self.name}_{name}").default, (emit.group_name, emit.site)
        if isinstance(site.nodes, GatherNodes):

            def gather(
                shard: fx.Node, rhs: list[fx.Node], biases: list[fx.Node | None], used: bool
            ) -> tuple[fx.Node, fx.Node | None, fx.Node]:
                out = emit.communicate(op, emit.chain, shard, rhs, biases, *scales, used, *own, *where)
                results, chain = (emit.call(getitem, out, i) for i in range(2))
                # (The gathered tensor stands behind the results where something reads it.)
                return results, emit.call(getitem, results, len(rhs)) if used else None, chain

            return looping.rewrite_gather(emit, site.nodes, gather)

        def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: list[fx.Node | None], reduce_op: str) -> fx.Node:
            if len(lhs) == 1:
                return emit.communicate(op, emit.chain, lhs[0], rhs[0], biases[0], *scales, *own, reduce_op, *where)
            # (The one with a bias, if any, first.)
            order = sorted(range(len(lhs)), key=lambda i: biases[i] is None)
            summed = getattr(looping.overlap, f"{self.name}_sum_{name}").default
            return emit.communicate(
                summed,
                emit.chain,
                [lhs[i] for i in order],
                [rhs[i] for i in order],
                biases[order[0]],
                *own,
                reduce_op,
                *where,
            )

        return looping.rewrite_reduce(emit, site.nodes, reduce, looping.summed(site.nodes))


def operands(site: OverlapSite) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(left, right)`` of each matmul as the op sees it: the gathered or scattered dim is the left operand's rows."""
    if isinstance(site.nodes, GatherNodes):
        return [_pair(c.matmul.lhs, c.matmul.rhs, c.role == "N") for c in site.nodes.consumers]
    return [_pair(m.lhs, m.rhs, site.nodes.sharded.dim == 1) for m in site.nodes.leaves]


def _why_not_right(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if right.dtype != left.dtype or not right_operand_fits(right):
        return (
            f"the right operand is {right.dtype}{list(right.shape)} with strides {list(right.stride())}; expected rows"
            " or columns of whole 16-byte words"
        )
    return None


def _pair(lhs: fx.Node, rhs: fx.Node, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = tools.value(lhs), tools.value(rhs)
    return (right.t(), left.t()) if transposed else (left, right)

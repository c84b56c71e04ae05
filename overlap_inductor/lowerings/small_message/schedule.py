# SPDX-License-Identifier: Apache-2.0
"""Schedule ``small_message``: a matmul and its all-reduce of few tokens become one op. With a static token count,
the kernel can also compute the residual add and the RMSNorm that follow (``_norm``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.lowerings.one_op.form import form_of
from overlap_inductor.lowerings.one_op.form import loopable
from overlap_inductor.lowerings.one_op.reduce_rows import summed
from overlap_inductor.lowerings.reduced_rows import rewrite_reduce
from overlap_inductor.lowerings.rows import bias_row
from overlap_inductor.lowerings.rows import overlap
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import OpCall
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.lowerings.schedule import SingleOp
from overlap_inductor.lowerings.small_message import cost
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.runtime.arena import Request
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.norm_epilogue import NormEpilogue
from overlap_inductor.sites.norm_epilogue import find_norm
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import sm_push

SETTINGS = "{}"
"""Settings that fix no parameter: the size of each call decides all parameters."""
ONE_BY_ONE = '{"replays": false}'


class SmallMessageSchedule:
    """See ``SiteSchedule``. The op calls the vendor's library for the matmul. With a dynamic token count, calls with
    too many rows for a small message run the plain collective, or another schedule's op (``beyond``: its name and
    settings)."""

    name = "small_message"
    transports = (sm_push.NAME,)
    patterns = ("matmul_all_reduce",)
    noun = "small-message kernel"
    called = "as a small message"
    ops = ("overlap_inductor.lowerings.small_message.ops",)
    called_by_others = False
    holds_workspace = True
    parameters = small_plan.SmallParameters

    @property
    def single_op(self) -> SingleOp:
        return self

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        return symmetric.why_no_symmetric_memory(ranks, device)

    def why_no_call(self, call: OpCall, transport: str, device: torch.device) -> str | None:
        reason = small_plan.why_not(call.dtype, len(call.ranks), call.tokens, call.columns)
        return reason or self.why_not_between(call.ranks, device)

    def settings_of(self, call: OpCall, transport: str) -> dict[str, Any]:
        return {}

    def request_of(self, call: OpCall, settings: str, site: str) -> Request:
        sizes = call.tokens, call.columns, call.dtype.itemsize
        return Request(site, *small_plan.needed_up_to(settings, len(call.ranks), *sizes))

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        facts = site.facts
        if (between := form_of(site).computed_between(site)) is not None:
            return (
                f"{between.name} ({between.target}) is between the matmuls and the collective; a {self.noun} cannot"
                " compute it"
            )
        if not loopable(site) or len(site.matmuls) > 1:
            return (
                "the all-reduced tensor is not the matmul's rows in their order, or the site is not one plain matmul"
                " with at most one row of bias"
            )
        rows, columns, like = site.nodes.tokens, *_columns(site)
        if not isinstance(columns, int):
            return f"the row length is only known at run time: {columns}"
        reason = small_plan.why_not(
            like.dtype, facts.collective.world_size, rows if isinstance(rows, int) else 1, columns
        )
        return reason or self.why_not_between(facts.collective.ranks, like.device)

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        parameters: dict[str, Any] = {
            "settings": SETTINGS if config.replay == "on" else ONE_BY_ONE,
            "norm": _norm(site) is not None,
        }
        if isinstance(site.nodes.tokens, int):
            return [PlanPiece(self.name, sm_push.NAME, (0, None), parameters, overlaps=False)]
        most = _most_rows(site)
        small = PlanPiece(self.name, sm_push.NAME, (0, most), parameters, overlaps=False)
        return [small, PlanPiece("keep", None, (most + 1, None))]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        return cost.seconds(sizes_at(site), machine_of(site, config))

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig, fewest: int = 0) -> list[PlanPiece] | None:
        most = _most_rows(site)
        # With dynamic rows, only the largest small message is estimated. For fewer rows the kernel pays all the more,
        # because the plain collective has the larger fixed cost.
        scale = 1.0 if isinstance(site.nodes.tokens, int) else most / max(hint(site.nodes.tokens), 1)
        return self.forced(site, config) if cost.pays(sizes_at(site, scale), machine_of(site, config)) else None

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> list[PlanPiece]:
        """Small messages serve calls of few tokens, whatever the token count of the example inputs. The first plan in
        ``others`` serves larger counts, from its first overlapped piece on. Counts between the two run ``keep``."""
        return _joined(own[0], others[0]) if others else own

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Does nothing: a site becomes one op, so no decision has to change for the graph's budget of nodes."""

    def request(self, site: OverlapSite, piece: PlanPiece) -> Request:
        rows, (columns, like) = site.nodes.tokens, _columns(site)
        rows = rows if isinstance(rows, int) else _most_rows(site)
        return Request(
            site.facts.id,
            *small_plan.needed_up_to(
                piece.parameters["settings"],
                site.facts.collective.world_size,
                max(rows, 1),
                columns,
                like.dtype.itemsize,
            ),
        )

    def anchor(self, site: DecidedSite) -> fx.Node | None:
        norm = _norm(site) if site.decision.moving.parameters["norm"] else None
        return None if norm is None else norm.residual_out

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        return ExchangeTerms(piece.parameters, site.nodes.cut(), True)

    def rewrite(self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        nodes = nodes_of(site, ReduceNodes)
        where = (parameters["settings"], emit.group_name, emit.site)
        norm = _norm(site) if parameters["norm"] else None
        if norm is None:

            def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: list[fx.Node | None], reduce_op: str) -> fx.Node:
                op = overlap.small_message_matmul_all_reduce.default
                return emit.communicate(
                    op,
                    emit.chain,
                    lhs[0],
                    rhs[0],
                    biases[0],
                    where[0],
                    reduce_op,
                    *where[1:],
                    *parameters.get("beyond", ()),
                )

            return rewrite_reduce(emit, nodes, reduce, summed(nodes))
        matmul = nodes.leaves[0]
        rows, columns = tools.shape(matmul.node)
        (bias,) = summed(nodes)
        bias = bias if bias is None else bias_row(emit, bias)
        residual, weight = emit.reshape(norm.residual, [rows, columns]), emit.reshape(norm.weight, [columns])
        op = overlap.small_message_matmul_all_reduce_norm.default
        out = emit.communicate(op, emit.chain, matmul.lhs, matmul.rhs, bias, residual, weight, norm.eps, *where)
        normed, residual_out, chain = (emit.call(getitem, out, i) for i in range(3))
        return chain, {
            norm.normed: emit.reshape(normed, tools.shape(norm.normed)),
            norm.residual_out: emit.reshape(residual_out, tools.shape(norm.residual_out)),
        }


def _joined(small: PlanPiece, large: list[PlanPiece]) -> list[PlanPiece]:
    """A plan with ``small`` for few tokens, then ``large`` from its overlapped piece on. Token counts between ``small``
    and this piece, if there are any, get ``keep``. One op serves the whole plan."""
    moving = next(p for p in large if p.schedule != "keep")
    most = small.tokens[1] or 0
    first = max(moving.tokens[0], most + 1)
    small = dataclasses.replace(
        small, parameters={**small.parameters, "beyond": [moving.schedule, moving.parameters["settings"]]}
    )
    between = [PlanPiece("keep", None, (most + 1, first - 1))] if first > most + 1 else []
    return [
        small,
        *between,
        dataclasses.replace(moving, tokens=(first, moving.tokens[1])),
        *(p for p in large if p.tokens[0] > first),
    ]


def _columns(site: OverlapSite) -> tuple[Any, Any]:
    """``(columns of the sum, example value of the collective's input)``."""
    like = tools.value(site.collectives[0].input)
    return tools.shape(site.matmuls[0].node)[-1], like


def _most_rows(site: OverlapSite) -> int:
    """Rows of the largest small message."""
    columns, like = _columns(site)
    return max(small_plan.LIMIT_BYTES // (columns * like.dtype.itemsize), 1)


def _norm(site: OverlapSite) -> NormEpilogue | None:
    """The norm that the kernel also computes, or ``None``. With a dynamic token count there is none: calls beyond the
    kernel's limit would compute the norm op by op."""
    nodes = nodes_of(site, ReduceNodes)
    if len(nodes.collectives) > 1 or nodes.collectives[0].reduce_op != "sum" or not isinstance(site.nodes.tokens, int):
        return None
    norm = find_norm(nodes.result)
    # If the residual is a collective's result, the norm is left to that collective's own site.
    if (
        norm is None
        or collectives.is_a_wait(norm.residual)
        or tools.written_between(nodes.collectives[0].node, norm.residual_out, nodes.leaves[0].node.all_input_nodes)
    ):
        return None
    return norm


SMALL_MESSAGE = SmallMessageSchedule()

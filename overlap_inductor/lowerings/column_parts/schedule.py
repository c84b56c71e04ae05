# SPDX-License-Identifier: Apache-2.0
"""Plan and rewrite a site with schedule ``column_parts``::

    y   = _grouped_mm(h, w, ends)                  y0 = _grouped_mm(h, w[:, :, :n], ends)
    s   = combine(y)                               r0 = all_reduce(combine(y0))
    r   = all_reduce(s)                     ->     y1 = after(_grouped_mm(h, w[:, :, n:], ends), r0)
    out = wait_tensor(r)                           r1 = all_reduce(combine(y1))
                                                   out = cat([wait_tensor(r0), wait_tensor(r1)], -1)   # after r1

``combine`` is the index, the pointwise ops and the sum of each token's rows. The nodes are ordinary ones, so Inductor
fuses each ``combine``, and a CUDA graph captures everything. Each element of the result is computed from the same row
and column, and is summed over the ranks by the same collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.cost_model import MARGIN
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import written_seconds
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings import reduced_rows
from overlap_inductor.lowerings.column_parts import cost
from overlap_inductor.lowerings.column_parts.columns import Columns
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedMatmul
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.sizes import has_example
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.target import on_gpu

aten = torch.ops.aten
PARTS = (4, 2)
"""The numbers of parts to choose from. More parts would make the grouped matmuls of common widths too narrow."""
WORD = 16
"""A part starts at a multiple of this many bytes, because ``_grouped_mm`` requires it of its operands."""


class ColumnParts:
    """See ``SiteSchedule``. Uses the program's own collective, so it has no transport."""

    name = "column_parts"
    patterns = ("matmul_all_reduce",)
    transports: tuple[str, ...] = ()
    noun = "cut of columns"
    called = "in parts of the columns"
    ops: tuple[str, ...] = ()
    called_by_others = False
    holds_workspace = False
    single_op = None

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> None:
        return None

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        nodes = nodes_of(site, ReduceNodes)
        (leaf, *others) = nodes.leaves
        if not isinstance(leaf, GroupedMatmul) or others:
            return "only the columns of experts' rows are cut into parts"
        if len(nodes.collectives) != 1 or nodes.padding is not None:
            return "the experts' rows are reduced by more than one collective, or padded"
        if config.schedule == "auto" and not on_gpu(tools.value(nodes.collectives[0].input).device):
            return "parts of columns were only considered for GPUs; set OVERLAP_INDUCTOR_SCHEDULE=column_parts"
        try:
            columns = Columns(leaf, nodes.collectives[0].input)
        except ValueError as error:
            return f"the columns cannot be cut into parts: {error}"
        if not _counts(columns):
            return f"{columns.width} columns cannot be cut into {min(PARTS)} equal parts of whole {WORD}-byte words"
        return None

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        columns = _columns(site)
        estimates = {n: self._seconds(site, config, n) for n in _counts(columns)} if has_example(site) else {}
        parts = min(estimates, key=estimates.__getitem__) if estimates else _counts(columns)[0]
        return [PlanPiece(self.name, None, (0, None), {"parts": parts})]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        return min(self._seconds(site, config, n) for n in _counts(_columns(site)))

    def _seconds(self, site: OverlapSite, config: OverlapConfig, parts: int) -> float:
        return cost.seconds(sizes_at(site), _part_sizes(site), machine_of(site, config), parts)

    def where_it_pays(
        self, site: OverlapSite, config: OverlapConfig, fewest: int = 0
    ) -> list[PlanPiece] | Reason | None:
        """The sizes of the example inputs decide whether the schedule pays, because the graph is the same for all token
        counts."""
        if not has_example(site):
            return Reason("dynamic_shape", "the sizes are only known when the graph runs, so there is no estimate")
        sizes, machine = sizes_at(site), machine_of(site, config)
        keep = written_seconds(sizes, machine) + collective_seconds(sizes, machine)
        return self.forced(site, config) if self.seconds(site, config) * MARGIN < keep else None

    def joined(self, site: OverlapSite, own: list[PlanPiece], others: Sequence[list[PlanPiece]]) -> None:
        return None

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Changes no decision: a rewrite adds too few nodes to matter for the graph's budget of nodes."""

    def request(self, site: OverlapSite, piece: PlanPiece) -> None:
        return None

    def anchor(self, site: DecidedSite) -> None:
        return None

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        return ExchangeTerms(dict(piece.parameters), None, False)

    def rewrite(self, emit: StepEmitter, site: DecidedSite, parameters: Mapping[str, Any]) -> tuple[fx.Node, Replaced]:
        nodes, columns, parts = nodes_of(site, ReduceNodes), _columns(site), parameters["parts"]
        collective, width = nodes.collectives[0], columns.width // parts
        starts: list[fx.Node] = []
        for part in range(parts):
            # The first part comes after the ranks have compared their plans.
            summed = columns.write(emit, part * width, width, starts[-1] if starts else emit.chain)
            starts.append(
                emit.call(collective.node.target, summed, *collective.node.args[1:], **collective.node.kwargs)
            )
        emit.kept += starts
        waits = [emit.call(collective.wait.target, start) for start in starts]
        for wait in waits[:-1]:
            emit.order[wait] = {starts[-1]}
        return emit.chain, reduced_rows.reduced(nodes, emit.call(aten.cat.default, waits, -1))


def _columns(site: OverlapSite) -> Columns:
    nodes = nodes_of(site, ReduceNodes)
    (leaf,) = nodes.leaves
    if not isinstance(leaf, GroupedMatmul):
        raise TypeError(f"{leaf.node.name} is {leaf.kind}; expected a grouped matmul, as when the site was planned")
    return Columns(leaf, nodes.collectives[0].input)


def _counts(columns: Columns) -> list[int]:
    itemsize = tools.dtype(columns.grouped).itemsize
    return [n for n in PARTS if columns.width % n == 0 and columns.width // n * itemsize % WORD == 0]


def _part_sizes(site: OverlapSite) -> cost.PartSizes:
    nodes = nodes_of(site, ReduceNodes)
    leaf, last, itemsize = nodes.leaves[0], nodes.matmul_sizes()[-1], tools.dtype(nodes.collectives[0].input).itemsize
    rows, result = (float(hint(tools.numel(tools.shape(n)))) for n in (leaf.node, nodes.collectives[0].input))
    flops = 2.0 * hint(last.m) * hint(last.n) * hint(last.k)
    return cost.PartSizes(flops, (rows + result) * itemsize, result * itemsize)

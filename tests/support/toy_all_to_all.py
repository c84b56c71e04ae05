# SPDX-License-Identifier: Apache-2.0
"""A pattern and a schedule from outside the package. The pattern is ``matmul -> cumsum -> all-to-all``. ::

    y = wait_tensor(all_to_all_single(cumsum(mm(x, w), 1)))          # equal splits of the rows
    ->  y, chain = overlap_toy::cumsum_all_to_all(chain, x, w, group, site)

For each peer, the op computes the rows that the peer receives, and sends them while it computes the next peer's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.lowerings import registry
from overlap_inductor.lowerings.schedule import ExchangeTerms
from overlap_inductor.passes import patterns
from overlap_inductor.passes.pattern import Example
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.placement import Placement
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.distributed import why_no_backend

PATTERN, SCHEDULE = "cumsum_all_to_all", "pairs"


@dataclass
class ExchangeNodes(SiteNodes):
    """matmul -> cumsum -> all-to-all over the result's rows."""

    collective: CollectiveNode
    matmul: MatmulNode

    @property
    def collectives(self) -> list[CollectiveNode]:
        return [self.collective]

    @property
    def matmuls(self) -> list[MatmulNode]:
        return [self.matmul]

    @property
    def sharded_dims(self) -> list[ShardedDim]:
        shape = tools.shape(self.matmul.node)
        return [ShardedDim.of(Layout.scattered(shape, self.collective.world_size))]

    @property
    def roles(self) -> list[str]:
        return ["M"]

    @property
    def tokens(self) -> Size:
        return tools.shape(self.matmul.node)[0]

    def matmul_sizes(self) -> list[MatmulSizes]:
        (m, k), n = tools.shape(self.matmul.lhs), tools.shape(self.matmul.rhs)[1]
        return [MatmulSizes([], m, n, k, own="K")]

    @property
    def is_sum(self) -> bool:
        return False

    def hands_out_gathered(self) -> bool:
        return False

    def others(self) -> list[fx.Node]:
        return [self.collective.input]

    def places(self) -> list[Placement]:
        return []

    def read_in_place(self) -> bool:
        return False

    def unused_after(self, replaced: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        return set()

    def rename(self, replaced: Mapping[fx.Node, fx.Node]) -> None:
        """Nothing to rename: the matmul's operands are read from its node."""

    def cut(self) -> tuple[list[Size], str]:
        return tools.shape(self.matmul.node)[:1], ""

    def order_sent(self) -> tuple[Layout, Layout] | None:
        return None

    def computed_ahead(self) -> list[str]:
        return []


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.cumsum(1), group=group)
    return out


class CumsumAllToAll:
    """See ``Pattern``: an all-to-all of equal parts of a matmul's running sums, which no other op reads."""

    name, kind, early = PATTERN, "all_to_all", False
    example = Example(
        first=False,
        shards_tokens=True,
        column_parallel=False,
        traced=lambda x, group: funcol.all_to_all_single(x.cumsum(1), None, None, group),
        eager=_exchanged,
    )

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        summed: Any = collective.input
        if summed.target is not tools.aten.cumsum.default or summed.args[1] not in (1, -1):
            return Miss()
        matmul = matmuls.parse(summed.args[0])
        if matmul is None:
            return Miss()
        if matmul.kind != "mm" or len(matmul.node.users) > 1 or len(summed.users) > 1:
            return Miss(
                [Reason("toy", f"{matmul.node.name} is not an mm, or other ops read its result or running sums")]
            )
        rows = tools.shape(matmul.node)[0]
        splits = [split for argument in collective.node.args[1:3] for split in argument]  # type: ignore[union-attr]
        if any(split * collective.world_size != rows for split in splits):
            return Miss([Reason("toy", f"splits of {splits} rows are not equal")])
        return Match(ExchangeNodes(collective, matmul), 0, "M")


class Pairs:
    """See ``SiteSchedule``: one op per site, which sends each peer's rows as soon as the rows are computed."""

    name, transports, patterns, noun, called = SCHEDULE, ("p2p",), (PATTERN,), "pair", "in pairs"
    ops: tuple[str, ...] = ()
    called_by_others = False
    holds_workspace = False
    single_op = None

    def why_not_between(self, ranks: tuple[int, ...], device: torch.device) -> str | None:
        return why_no_backend(device)

    def why_not(self, site: OverlapSite, config: OverlapConfig) -> str | None:
        return None

    def forced(self, site: OverlapSite, config: OverlapConfig) -> list[PlanPiece]:
        return [PlanPiece(self.name, "p2p", (0, None), {"pairs": site.facts.collective.world_size})]

    def seconds(self, site: OverlapSite, config: OverlapConfig) -> float:
        sizes, machine = sizes_at(site), machine_of(site, config)
        return max(cost_model.matmul_seconds(sizes, machine), cost_model.collective_seconds(sizes, machine))

    def where_it_pays(self, site: OverlapSite, config: OverlapConfig, fewest: int = 0) -> list[PlanPiece]:
        return self.forced(site, config)

    def joined(self, site: OverlapSite, own: Any, others: Any) -> None:
        return None

    def fit(self, sites: list[DecidedSite], config: OverlapConfig) -> None:
        """Nothing to shorten: a site is one node already."""

    def request(self, site: OverlapSite, piece: PlanPiece) -> None:
        return None

    def anchor(self, site: DecidedSite) -> None:
        return None

    def exchange(self, site: DecidedSite, piece: PlanPiece) -> ExchangeTerms:
        return ExchangeTerms(piece.parameters, site.nodes.cut(), False)

    def rewrite(
        self, emit: StepEmitter, site: OverlapSite, parameters: Mapping[str, Any]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ExchangeNodes)
        op = torch.ops.overlap_toy.cumsum_all_to_all.default
        out = emit.communicate(op, emit.chain, nodes.matmul.lhs, nodes.matmul.rhs, emit.group_name, emit.site)
        result, chain = (emit.call(getitem, out, i) for i in range(2))
        return chain, {nodes.collective.wait: result, nodes.collective.node: result}


def _cumsum_all_to_all(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    size, rank = group.size(), group.rank()
    rows = lhs.chunk(size)
    out = lhs.new_empty(lhs.shape[0], rhs.shape[1])
    received, pending, sent = out.chunk(size), [], []
    for shift in range(1, size):
        to, source = (rank + shift) % size, (rank - shift) % size
        sent.append((rows[to] @ rhs).cumsum(1))
        pending.append(dist.isend(sent[-1], group=group, group_dst=to))
        pending.append(dist.irecv(received[source], group=group, group_src=source))
    received[rank].copy_((rows[rank] @ rhs).cumsum(1))
    for work in pending:
        work.wait()
    return out, torch.empty_like(chain)


def _fake(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs.new_empty(lhs.shape[0], rhs.shape[1]), torch.empty_like(chain)


_library = torch.library.Library("overlap_toy", "DEF")
_library.define("cumsum_all_to_all(Tensor chain, Tensor lhs, Tensor rhs, str group_name, str site) -> (Tensor, Tensor)")
_library.impl("cumsum_all_to_all", _cumsum_all_to_all, "CompositeExplicitAutograd")
torch.library.register_fake("overlap_toy::cumsum_all_to_all", _fake, lib=_library)


@contextmanager
def registered() -> Iterator[None]:
    """Register the pattern and the schedule inside the block."""
    pattern, schedule = CumsumAllToAll(), Pairs()
    patterns.register(pattern)
    registry.register(schedule)
    try:
        yield
    finally:
        registry.unregister(schedule)
        patterns.unregister(pattern)

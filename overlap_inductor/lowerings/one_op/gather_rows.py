# SPDX-License-Identifier: Apache-2.0
"""Write a gather as one op: decide which matmuls the op computes, and lay out operands and results for it."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.rows import CONTRACTION
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import SCALED
from overlap_inductor.lowerings.rows import Op
from overlap_inductor.lowerings.rows import as_bits_of
from overlap_inductor.lowerings.rows import gathered_as
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.lowerings.rows import transposed
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherConsumer
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.step_emitter import StepEmitter


class GatherRows:
    """See ``form.RowsForm``."""

    turns = True

    def served(self, site: OverlapSite) -> OverlapSite:
        nodes = nodes_of(site, GatherNodes)
        if len({m.kind in SCALED for m in site.matmuls}) > 1:
            return site
        able = [
            c for c in nodes.consumers if c.matmul.kind in PLAIN and one_bias_row(c.matmul) and _gathers_rows(c, nodes)
        ]
        able = [c for c in able if _one_shape([able[0], c])]
        return replace(site, nodes=replace(nodes, consumers=able)) if 0 < len(able) < len(nodes.consumers) else site

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, GatherNodes)
        return (
            all(map(one_bias_row, site.matmuls))
            and all(_gathers_rows(c, nodes) for c in nodes.consumers)
            and _one_shape(nodes.consumers)
        )

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return True

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        nodes = nodes_of(site, GatherNodes)
        return next((n for n in nodes.layouts if n is not nodes.collective.wait and n not in nodes.through), None)

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        return int(left.shape[1]), int(right.shape[1])

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        return None

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        return CONTRACTION if set(site.nodes.roles) == {"K"} else None

    def why_not_scaled(self, site: OverlapSite) -> str | None:
        moved = tools.dtype(site.collectives[0].input)
        operand = tools.dtype(nodes_of(site, GatherNodes).consumers[0].operand_node)
        if moved.itemsize != operand.itemsize:
            return (
                f"the collective gathers {moved}, which is cast to {operand} after it; expected it to gather {operand}"
            )
        return None

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, GatherNodes)
        first = nodes.consumers[0]
        bits = as_bits_of(emit, nodes.collective.input, tools.dtype(first.operand_node))
        shard, rhs = emit.reshape(bits, shard_shape(first)), right_operands(emit, nodes)
        biases, used = [c.matmul.bias for c in nodes.consumers], nodes.hands_out_gathered()
        terms = map(list, zip(*scales, strict=True))
        out = emit.communicate(op(""), emit.chain, shard, rhs, biases, *terms, used, *own, emit.group_name, emit.site)
        results, chain = (emit.call(getitem, out, i) for i in range(2))
        gathered = emit.call(getitem, results, len(rhs)) if used else None
        replaced = {
            c.matmul.node: placed(emit, c, emit.call(getitem, results, i)) for i, c in enumerate(nodes.consumers)
        }
        return chain, replaced if gathered is None else replaced | gathered_as(emit, nodes, gathered)


def right_operands(emit: StepEmitter, nodes: GatherNodes) -> list[fx.Node]:
    """The right operand that the op takes for each matmul. If dim N is cut, this is the transposed left operand."""
    return [c.matmul.rhs if c.role == "M" else transposed(emit, c.matmul.lhs) for c in nodes.consumers]


def placed(emit: StepEmitter, consumer: GatherConsumer, result: fx.Node) -> fx.Node:
    """The matmul's result as the graph reads it. ``result``: the op's result, with its rows in the ranks' order."""
    result = emit.cut_to_size(rows_in_place(emit, result, consumer.sharded, from_ranks=True), 0, consumer.sharded)
    return result if consumer.role == "M" else emit.contiguous(transposed(emit, result))


def one_bias_row(matmul: MatmulNode) -> bool:
    return matmul.bias is None or len(tools.shape(matmul.bias)) == 1


def _gathers_rows(consumer: GatherConsumer, nodes: GatherNodes) -> bool:
    if consumer.role not in ("M", "N") or (consumer.role == "N" and consumer.matmul.bias is not None):
        return False
    rows_first = consumer.layout if consumer.role == "M" else consumer.layout.permute([1, 0])
    return nodes.raw.without_rank().same_elements(rows_first.without_rank()) and nodes.only_views(consumer.operand_node)


def _one_shape(consumers: list[GatherConsumer]) -> bool:
    """Whether all matmuls read the gathered tensor in one shape and dtype."""
    shapes = [shard_shape(c) for c in consumers]
    return len({tools.dtype(c.operand_node) for c in consumers}) == 1 and all(
        same_size(a, b) for other in shapes[1:] for a, b in zip(shapes[0], other, strict=True)
    )


def shard_shape(consumer: GatherConsumer) -> list[Any]:
    """``[rows, width]`` of a shard as the matmul reads it, with the gathered dim first."""
    width = tools.shape(consumer.operand_node)[1 if consumer.role == "M" else 0]
    return [consumer.sharded.outer * consumer.sharded.chunk, width]

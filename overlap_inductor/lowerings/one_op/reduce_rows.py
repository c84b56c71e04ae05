# SPDX-License-Identifier: Apache-2.0
"""``ReduceRows`` writes matmuls and the collective after them as one op."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.reduced_rows import Biases
from overlap_inductor.lowerings.reduced_rows import biases_of
from overlap_inductor.lowerings.reduced_rows import reduced
from overlap_inductor.lowerings.reduced_rows import reduced_in_rows
from overlap_inductor.lowerings.reduced_rows import rewrite_reduce
from overlap_inductor.lowerings.rows import Op
from overlap_inductor.lowerings.rows import bias_row
from overlap_inductor.lowerings.rows import is_row
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter


class ReduceRows:
    """See ``form.RowsForm``."""

    turns = True

    def served(self, site: OverlapSite) -> OverlapSite:
        return site

    def loopable(self, site: OverlapSite) -> bool:
        nodes = nodes_of(site, ReduceNodes)
        biases = biases_of(nodes, nodes.computed)
        if biases is None or any(b is not None and not is_row(b) for b in biases) or nodes.padding is not None:
            return False
        return reduced_in_rows(site.facts.pattern, nodes, biases)

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        return nodes_of(site, ReduceNodes).sharded.dim == 0

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        region = nodes_of(site, ReduceNodes).region
        if region is None:
            return None
        broadcasting = (op for tensor, op in region.broadcast.items() if not is_row(tensor))
        return next(iter((*region.reduced, *region.joined, *broadcasting)), None)

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        return int(left.shape[1]), int(right.shape[1])

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        if len(site.matmuls) == 1:
            return None
        if not sums:
            return f"{len(site.matmuls)} matmuls are added into one reduction; a {noun} computes only one"
        if (biased := sum(b is not None for b in summed(nodes_of(site, ReduceNodes)))) > 1:
            return f"{biased} of the matmuls that are added into one reduction have a bias; a {noun} adds only one"
        if len(dtypes := {str(tools.dtype(m.lhs)) for m in site.matmuls}) > 1:
            return f"matmuls of {' and '.join(sorted(dtypes))} are added into one reduction; expected one dtype"
        return None

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        return None

    def why_not_scaled(self, site: OverlapSite) -> str | None:
        moved = tools.dtype(site.collectives[0].input)
        if moved not in (torch.bfloat16, torch.float16):
            return f"partial sums of {moved} are reduced; expected fp16 or bf16"
        return None

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        nodes = nodes_of(site, ReduceNodes)

        if site.facts.pattern == "matmul_all_gather":
            return gathered_output(emit, nodes, op, own)

        def reduce(lhs: list[fx.Node], rhs: list[fx.Node], biases: Biases, reduce_op: str) -> fx.Node:
            first, where = scales[0] if scales else (), (*own, reduce_op, emit.group_name, emit.site)
            if len(lhs) == 1:
                return emit.communicate(op(""), emit.chain, lhs[0], rhs[0], biases[0], *first, *where)
            # The op for sums adds the bias of its first matmul, so a matmul with a bias comes first.
            order = sorted(range(len(lhs)), key=lambda i: biases[i] is None)
            left, right = [lhs[i] for i in order], [rhs[i] for i in order]
            return emit.communicate(op("sum_"), emit.chain, left, right, biases[order[0]], *where)

        return rewrite_reduce(emit, nodes, reduce, summed(nodes))


def gathered_output(
    emit: StepEmitter, nodes: ReduceNodes, op: Op, own: tuple[Any, ...]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Write a matmul and the all-gather of its result. If the program puts the ranks' slices side by side, so does the
    op, and the program's ``cat`` is replaced instead of the collective."""
    (leaf,), (bias,), join = nodes.leaves, summed(nodes), nodes.joined()
    row = None if bias is None else bias_row(emit, bias)
    where = (join is not None, *own, emit.group_name, emit.site)
    out = emit.communicate(op(""), emit.chain, leaf.lhs, leaf.rhs, row, *where)
    result, chain = (emit.call(getitem, out, i) for i in range(2))
    if join is not None:
        return chain, {join: emit.reshape(result, tools.shape(join))}
    return chain, reduced(nodes, emit.reshape(result, tools.shape(nodes.collectives[0].node)))


def summed(nodes: ReduceNodes) -> Biases:
    """The biases of a site's matmuls, which are added. The site has passed ``loopable``. Raises ``RuntimeError`` if the
    graph has changed since then, so that the collective's input is no longer this sum."""
    biases = biases_of(nodes, nodes.computed)
    if biases is None:
        raise RuntimeError(
            "the collective's input was a sum of matmuls when the site was checked, but the graph has changed since"
        )
    return biases

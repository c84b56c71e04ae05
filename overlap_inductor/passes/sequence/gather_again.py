# SPDX-License-Identifier: Apache-2.0
"""Decide what a training graph saves of a gathered tensor: all rows, or only the rank's rows, which the backward
gathers again (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

The matmuls of the forward and of the weights' gradients read all rows, which take W times the memory of a rank's rows::

    forward:   g = all_gather(n); y = mm(g, w)            saved: n [t, H] instead of g [T, H]
    backward:  g = all_gather(n); dw = mm(dy^T, g)        the gather is hidden under dw

Only the rank's rows are saved if

- the tensors are not on a CPU, and the gradients' matmuls are estimated to take at least ``MARGIN`` times as long as
  the transfer, or
- the user wants to save memory (``torch_compat.recompute.memory_comes_first``), or
- the forward does not need all rows.

If the number of tokens is symbolic and W does not divide it, the gradients' matmuls do not hide the gather.

The pass tags nodes as recomputed, and the partitioner does not save a tagged node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Mapping

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites import sizes
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.recompute import compute_again
from overlap_inductor.torch_compat.recompute import memory_comes_first

aten = tools.aten

MARGIN = 1.25
"""The gradients' matmuls must take at least this many times as long as the transfer."""


def save_rows(
    graph: fx.Graph, made: Mapping[fx.Node, tuple[int, fx.Node]], backward: set[fx.Node], config: OverlapConfig
) -> list[fx.Node]:
    """Tag the gathers of the forward that the backward repeats. Returns those whose results the forward also reads.

    Args:
        graph: the joint graph.
        made: the collectives that the rewrite has written, each with the number of its stretch and the node whose place
            it takes.
        backward: the nodes that exist only in the backward.
    """
    repeated = []
    always = memory_comes_first(graph)
    for collective, node in _gathers(graph, made):
        if made[collective][1] in backward:
            continue
        views, readers, cut = _behind(node.wait)
        gradients = [r for r in readers if r in backward and r.op != "output"]
        overlapped = [r for r in gradients if r not in cut]
        forward_reads = len(gradients) < len(readers)
        if not gradients or (forward_reads and not always and not hidden(node, overlapped, config)):
            continue
        for part in (collective, node.wait, *views):
            compute_again(part)
        if forward_reads:
            repeated.append(collective)
    return repeated


def _gathers(graph: fx.Graph, made: Iterable[fx.Node]) -> list[tuple[fx.Node, CollectiveNode]]:
    """The all-gathers among the collectives ``made``."""
    written = set(made)
    found = find_collectives(graph)
    return [
        (node, one)
        for node, kind, one in found
        if node in written and kind == "all_gather" and isinstance(one, CollectiveNode)
    ]


def _behind(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node], set[fx.Node]]:
    """``(views, readers, cut)``: the views, permutations and slices of ``wait``, and the other nodes that read it or a
    view. ``cut``: the nodes that read a slice of symbolic length. No schedule overlaps their matmuls with the gather
    (``passes.sequence.padded_matmuls``)."""
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    cut: set[fx.Node] = set()
    pending = [wait]
    while pending:
        source = pending.pop()
        for user in source.users:
            is_slice = user.target is aten.slice.Tensor
            if source in cut or (is_slice and _is_of_symbolic_length(user)):
                cut.add(user)
            if tools.is_reshape(user) or tools.permutation(user) is not None or is_slice:
                views.append(user)
                pending.append(user)
            else:
                readers.append(user)
    return views, readers, cut


def _is_of_symbolic_length(node: fx.Node) -> bool:
    return isinstance(tools.shape(node)[operators.argument(node, "dim")], torch.SymInt)


def hidden(collective: CollectiveNode, gradients: Iterable[fx.Node], config: OverlapConfig) -> bool:
    """Whether the matmuls among ``gradients`` are estimated to hide ``collective``. False on CPUs, where a transfer
    takes the cores that the matmuls need."""
    if tools.value(collective.input).device.type == "cpu":
        return False
    machine = sizes.machine_at(collective, config)
    transfer = cost_model.collective_seconds(sizes.moved_by(collective), machine)
    return sum(_seconds(node, collective, config) for node in gradients) >= MARGIN * transfer


def _seconds(node: fx.Node, collective: CollectiveNode, config: OverlapConfig) -> float:
    """Estimated seconds of ``node``; 0 if it is not a matmul."""
    matmul = matmuls.parse(node)
    if matmul is None:
        return 0.0
    # All ranks must decide alike, but their shards of a weight may differ in size. So the sizes are rounded.
    dims = [sizes.rounded(sizes.hint(s)) for s in (*tools.shape(node), tools.shape(matmul.lhs)[-1])]
    flops = 2.0 * math.prod(dims)
    itemsize = tools.dtype(matmul.lhs).itemsize
    alone = cost_model.SiteSizes(flops, 0.0, itemsize, collective.world_size)
    return cost_model.matmul_seconds(alone, sizes.machine_at(collective, config))

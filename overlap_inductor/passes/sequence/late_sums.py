# SPDX-License-Identifier: Apache-2.0
"""Combine sums over tokens in one all-reduce at the end of the graph, if only results of the graph depend on them.

A graph may compute many small gradients of norms' weights. If each gradient had an all-reduce of its own, most of the
time of these all-reduces would be fixed costs::

    dw0 = all_reduce(part0); ...; dw64 = all_reduce(part64)
    ->  s = wait_tensor(all_reduce(cat(part0, ..., part64))); dw0 = s[:8192]; ...       # in front of the output

Each combination of group, dtype and device has at most one such all-reduce in the forward, and one in the backward.
Nodes that are computed from a sum (a view, a cast) move behind the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.sums import REDUCE_OPS
from overlap_inductor.sites import graph_tools as tools

aten = tools.aten
MOST_USERS = 4
"""The most nodes that may be computed from a sum that is combined late."""


def is_late(node: fx.Node) -> bool:
    """Whether ``node``, a sum over tokens, may be combined late: only a few small steps lead from it to results of the
    graph."""
    if REDUCE_OPS[node.target] != "sum" or any(isinstance(s, torch.SymInt) for s in tools.shape(node)):
        return False
    users = behind(node)
    size = tools.numel(tools.shape(node))
    return len(users) <= MOST_USERS and all(
        (tools.is_reshape(u) or tools.is_pointwise(u)) and tools.numel(tools.shape(u)) <= size for u in users
    )


def behind(node: fx.Node) -> list[fx.Node]:
    """In graph order, the nodes that are computed from ``node``, without the output."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        new = [u for u in pending.pop().users if u.op != "output" and u not in found]
        found.update(new)
        pending += new
    return sorted(found)


def of_the_backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a tangent, and so exist only in the backward."""
    found = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    for node in graph.nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def combine(parts: Iterable[fx.Node], all_reduced: Callable[[fx.Node], fx.Node], writer: Writer) -> list[fx.Node]:
    """Sum each tensor of ``parts``, all of one dtype and device, over the ranks. Returns the sums, each
    flat, in the order of ``parts``. ``all_reduced(x)`` writes the all-reduce of ``x`` and a wait, and returns the
    wait."""
    flat = [writer.reshape(p, [tools.numel(tools.shape(p))]) for p in parts]
    if len(flat) == 1:
        return [all_reduced(flat[0])]
    total = all_reduced(writer.call(aten.cat.default, flat))
    lengths = [tools.shape(p)[0] for p in flat]
    pieces: Any = writer.call(aten.split_with_sizes.default, total, lengths)
    return [writer.call(getitem, pieces, i) for i in range(len(flat))]

# SPDX-License-Identifier: Apache-2.0
"""Prove that an index tensor holds each index once, from the nodes that compute the tensor.

Such an index brings rows from their senders' order into the experts' order. A run is the rows from one rank for
one expert. ``v`` holds the number of rows of each run. ``f`` reorders these numbers by views and permutations::

    segment = repeat_interleave(f(v))                       # for each row, the number of its run of rows
    index   = f(cumsum(v) - v)[segment] + arange(rows) - (cumsum(f(v)) - f(v))[segment]

Let ``y = x[index]``. Run ``i`` of ``y`` is the run of ``x`` that ``f`` moves to place ``i``. So ``y`` has each run of
``x`` once, and ``index`` holds each index once.

The backward graph gets the index as an input, without the nodes that compute it. So the pass on the joint graph records
its proof in the index's metadata. The partitioner copies the metadata to both graphs.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.row_steps import is_grouped_operator

aten = torch.ops.aten
PERMUTATION = "overlap_permutation"
"""Metadata of an index tensor: true if it holds each index once."""


def note(graph: fx.Graph) -> None:
    """If the graph has grouped matmuls, mark the first index of each ``index`` op, if this index is known to be a
    permutation."""
    if not any(map(is_grouped_operator, graph.nodes)):
        return
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        index = node.args[1][0]
        if tools.is_tensor(index) and is_permutation(index):
            index.meta[PERMUTATION] = True


def is_permutation(node: fx.Node) -> bool:
    """Whether the vector ``node`` is known to hold each of ``0, 1, ... len - 1`` once."""
    return bool(node.meta.get(PERMUTATION)) or runs_of(node) is not None


def runs_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``(f(v), v)`` if the vector ``node`` is a permutation of the module's form, else ``None``."""
    if len(tools.shape(node)) != 1 or node.target is not aten.sub.Tensor or node.kwargs:
        return None
    total, starts = node.args
    if getattr(total, "target", None) is not aten.add.Tensor or total.kwargs:
        return None
    terms = list(total.args)
    counted = next((t for t in terms if _counts(t, tools.shape(node)[0])), None)
    if counted is None or len(terms) != 2:
        return None
    terms.remove(counted)
    sources, results = _at_segments(terms[0]), _at_segments(starts)
    if sources is None or results is None or sources[1] is not results[1]:
        return None
    lengths = sources[1]
    if _starts_of(results[0]) is not lengths:
        return None
    original = _moved_alike(sources[0], lengths)
    return None if original is None else (lengths, original)


def _counts(node: object, rows: object) -> bool:
    """Whether ``node`` is ``arange(rows)``."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.prims.iota.default:
        return False
    return node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1 and same_size(tools.shape(node)[0], rows)


def _at_segments(node: object) -> tuple[fx.Node, fx.Node] | None:
    """``(x, lengths)`` if ``node`` is ``x[repeat_interleave(lengths)]``."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor or len(node.args[1]) != 1:
        return None
    segments = node.args[1][0]
    if segments.target is aten.index.Tensor and len(segments.args[1]) == 1:
        numbers, segments = segments.args[0], segments.args[1][0]
        if not _counts(numbers, tools.shape(numbers)[0]):
            return None
    if segments.target is not aten.repeat_interleave.Tensor:
        return None
    return node.args[0], segments.args[0]


def _starts_of(node: fx.Node) -> fx.Node | None:
    """``lengths`` if ``node`` holds the number of the first row of each run: ``cumsum(lengths) - lengths``."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    summed, lengths = node.args
    exact = getattr(summed, "target", None) is aten.cumsum.default and summed.args == (lengths, 0)
    return lengths if exact and not summed.kwargs and len(tools.shape(lengths)) == 1 else None


def _moved_alike(starts: fx.Node, lengths: fx.Node) -> fx.Node | None:
    """The lengths of runs from which views and permutations made ``lengths``, if the same ones made ``starts`` from the
    starts of these runs; else ``None``."""
    while _starts_of(starts) is not lengths:
        moves = all(
            tools.is_reshape(n) or tools.permutation(n) is not None or n.target in tools.SAME for n in (starts, lengths)
        )
        if not moves or not tools.same_shape(starts, lengths):
            return None
        if tools.permutation(starts) != tools.permutation(lengths):
            return None
        starts, lengths = starts.args[0], lengths.args[0]
    return lengths

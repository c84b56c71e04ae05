# SPDX-License-Identifier: Apache-2.0
"""Prove that the rows from each rank arrive in the order of the experts, from the nodes that compute the index which
orders all rows.

``v`` holds the number of rows of each run: of the rows from one rank for one expert, rank by rank. The index moves
these runs into the order of the experts (``sites.permutations``)::

    received[r] = item(select(sum(reshape(v, [ranks, experts]), 1), r))     # rows from rank r
    index       = the permutation of the runs by  reshape(permute(reshape(v, [ranks, experts]), [1, 0]), [-1])

Then the runs of one rank keep their order: in ``v`` they follow each other by expert, and in the index, too. So a part,
or a range of rows of it, needs no reordering.

The backward graph gets the index as an input. So the pass on the joint graph records in the index's metadata for which
numbers of received rows this was proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import permutations
from overlap_inductor.sites.all_to_all import Splits
from overlap_inductor.sites.row_steps import is_grouped_operator
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
SORTED = "overlap_sorted_parts"
"""Metadata of an index: the numbers of rows of the parts in which the rows arrive in the order of the experts."""
_COPIES = (torch.ops.prims.device_put.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def note(graph: fx.Graph) -> None:
    """If the graph has grouped matmuls, record the proof for each index that reorders rows from an all-to-all."""
    if not any(map(is_grouped_operator, graph.nodes)):
        return
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        (index, *others), source = node.args[1], node.args[0]
        while source.target is torch.ops._c10d_functional.wait_tensor.default:
            source = source.args[0]
        if others or not tools.is_tensor(index) or not operators.is_functional_collective(source):
            continue
        if operators.argument(source, "output_split_sizes") is None:
            continue
        received = Splits.of(source).received
        if _sorted_by(index, received):
            index.meta[SORTED] = _numbers(received)


def are_sorted(index: fx.Node, received: Sequence[Any]) -> bool:
    """Whether the rows of each part arrive in the order into which ``index`` brings all rows. ``received``: the numbers
    of rows of the parts, ints or nodes."""
    return index.meta.get(SORTED) == _numbers(received) or _sorted_by(index, received)


def _numbers(received: Sequence[Any]) -> list[str]:
    """Texts that are equal for equal numbers, in the joint graph and in the graphs that are cut from it."""
    return [str(tools.value(n)) if isinstance(n, fx.Node) else str(n) for n in received]


def _sorted_by(index: fx.Node, received: Sequence[Any]) -> bool:
    runs = permutations.runs_of(index)
    if runs is None:
        return False
    moved, lengths = runs
    # Reads the moves backwards: a reshape to one dim, then the permutation of ranks and experts, then a reshape.
    node = moved
    while node.target in tools.SAME or tools.is_reshape(node):
        node = node.args[0]
    if tools.permutation(node) != [1, 0]:
        return False
    by_rank = node.args[0]
    while by_rank.target in tools.SAME:
        by_rank = by_rank.args[0]
    shape = tools.shape(by_rank)
    # Sizes are compared only if they are ints, because comparing symbols adds a guard, or fails.
    known = len(shape) == 2 and all(isinstance(size, int) for size in shape)
    if not known or shape[0] != len(received) or not tools.is_reshape(by_rank) or by_rank.args[0] is not lengths:
        return False
    return all(_counts(rows, rank, by_rank) for rank, rows in enumerate(received))


def _counts(rows: Any, rank: int, by_rank: fx.Node) -> bool:
    """Whether ``rows`` is the number of rows from ``rank``: the sum of row ``rank`` of ``by_rank`` or a like view."""
    if getattr(rows, "target", None) is not aten._local_scalar_dense.default:
        return False
    one = rows.args[0]
    if one.target is not aten.select.int or tuple(one.args[1:]) != (0, rank):
        return False
    total = one.args[0]
    while total.target in _COPIES and not tools.dtype(total).is_floating_point:
        total = total.args[0]
    if total.target is not aten.sum.dim_IntList or len(total.args) != 2 or total.args[1] not in ([1], [-1]):
        return False
    source = total.args[0]
    return tools.is_reshape(source) and source.args[0] is by_rank.args[0] and tools.same_shape(source, by_rank)

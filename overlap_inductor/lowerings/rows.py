# SPDX-License-Identifier: Apache-2.0
"""Bring rows or columns into the ranks' order, for sites that are written as one op.

In the *ranks' order*, the rows of rank 0 come first, then those of rank 1, and so on. Most of the ops compute 2-D
matmuls with rows in this order. If a site's rows have another order, or its columns are cut, the graph around the op
changes:

- If each rank has ``outer`` runs of ``chunk`` rows, the rows have the order ``[outer, rank, chunk]``. Such rows are
  permuted: in the result after a gather, in the left operand before a scatter.
- For cut columns, most ops compute the transposed product. Its result is transposed and copied. The vendor's matmul
  reads transposed operands in place; a Triton kernel may need a copy (``operands.left_operand``).
- Two kinds of ops take cut columns without a transposition: ops for matmuls before an all-to-all, and the ring's
  looping op for gathers. For these ops, columns that have another order are permuted, as rows are.

For a cut contracted dim, there are other ops (``lowerings.ring.looped_gather``, ``one_op.exchange_rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor

PLAIN: tuple[str, ...] = ("mm", "addmm")
SCALED: tuple[str, ...] = ("scaled_mm",)
"""Kinds of matmuls (``MatmulNode.kind``). No op computes both a kind in ``PLAIN`` and a kind in ``SCALED``. The ring's
looping ops compute no kind in ``SCALED``."""
CONTRACTION = (
    "a matmul contracts the dim that is divided among the ranks; expected it among the matmul's rows or columns"
)
"""Why a site is refused, if its contracted dim is cut and the op computes only matmuls with cut rows or columns."""
Op = Callable[[str], Any]
"""A function that returns the overload of a schedule's op. Its argument is the part of the op's name between schedule
and pattern: empty, ``sum_`` or ``contracted_``."""


def is_row(node: fx.Node) -> bool:
    """Whether ``node`` has at least one dim, and size 1 in all dims but the last."""
    return bool(tools.shape(node)) and all(isinstance(s, int) and s == 1 for s in tools.shape(node)[:-1])


def bias_row(emit: StepEmitter, row: fx.Node) -> fx.Node:
    """``row [1, ..., n]`` reshaped to a vector ``[n]``, as the ops expect a bias."""
    return emit.reshape(row, tools.shape(row)[-1:])


def as_bits_of(emit: StepEmitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``x`` with its bits read as ``dtype``, for fp8 data that is sent as bytes. Elements of both dtypes have the same
    size. A node is written only if needed."""
    if tools.is_bitcast(x) and tools.dtype(x.args[0]) == dtype:
        return x.args[0]
    return x if tools.dtype(x) == dtype else emit.call(aten.view.dtype, x, dtype)


def transposed(emit: StepEmitter, x: fx.Node) -> fx.Node:
    """``x`` with its two dims swapped (a view)."""
    return emit.call(aten.permute.default, x, [1, 0])


def rows_in_place(emit: StepEmitter, x: fx.Node, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``x [rows, columns]`` with its rows moved from the ranks' order to the tensor's own order. If not ``from_ranks``,
    they are moved back."""
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        return x
    rank, columns = Atom(emit.world_size, rank=True), Atom(tools.shape(x)[1])
    by_rank = Layout(((rank, *sharded.before, *sharded.after), (columns,)))
    in_place = Layout(((*sharded.before, rank, *sharded.after), (columns,)))
    return emit.convert(x, by_rank, in_place) if from_ranks else emit.convert(x, in_place, by_rank)


def columns_in_place(emit: StepEmitter, x: fx.Node, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``rows_in_place`` for the columns of ``x [rows, columns]``."""
    if isinstance(sharded.outer, int) and sharded.outer == 1:
        return x
    return transposed(emit, rows_in_place(emit, transposed(emit, x), sharded, from_ranks))


def gathered_as(emit: StepEmitter, nodes: GatherNodes, gathered: fx.Node) -> dict[fx.Node, fx.Node]:
    """The replacements of the collective and its wait. ``gathered``: the rows of all shards, in the ranks' order."""
    whole = as_bits_of(
        emit, emit.reshape(gathered, tools.shape(nodes.collective.node)), tools.dtype(nodes.collective.node)
    )
    return {nodes.collective.wait: whole, nodes.collective.node: whole}

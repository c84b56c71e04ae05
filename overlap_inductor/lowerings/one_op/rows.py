# SPDX-License-Identifier: Apache-2.0
"""Bring rows into the ranks' order, for every site that is written as one op.

The ops of ``lowerings.ring.looped_reduce_ops`` and of the schedules with one op for each site (``lowerings.fused.ops``
...) cut 2-D matmuls along their leading rows: rank r has the r-th run of rows. This is the *ranks' order*. Other cuts
are brought into this form:

- A gather or scatter of an inner dim, whose rows have the order ``[outer, rank, chunk]``: the result of a gather, or
  the left operand of a scatter, is permuted.
- A cut along columns: the op computes the transposed product. The vendor's matmul needs no copy for that. A fused
  kernel copies its left operand.

A cut along the contracted dim is computed by the ring's looping op only (``lowerings.ring.looped_gather``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.step_emitter import StepEmitter

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor

PLAIN: tuple[str, ...] = ("mm", "addmm")
SCALED: tuple[str, ...] = ("scaled_mm",)
"""``PLAIN`` and ``SCALED`` are kinds of matmuls that one op can compute together. The ring's looping ops compute plain
ones only."""
Op = Callable[[str], Any]
"""Takes the prefix that precedes the pattern in the name of a schedule's op (empty, or ``sum_``), and returns the op's
overload."""


def is_row(node: fx.Node) -> bool:
    """Whether ``node`` has at least one dim, and size 1 in all dims but the last. Such a row broadcasts to any number
    of rows."""
    return bool(tools.shape(node)) and all(isinstance(s, int) and s == 1 for s in tools.shape(node)[:-1])


def bias_row(emit: StepEmitter, row: fx.Node) -> fx.Node:
    """``row [1, ..., n]`` reshaped to a vector ``[n]``, as the ops expect a bias."""
    return emit.reshape(row, tools.shape(row)[-1:])


def as_bits_of(emit: StepEmitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``x`` with its bits read as ``dtype``; ``x`` itself if it has that dtype. It serves fp8 data that is sent as
    bytes."""
    if tools.is_bitcast(x) and tools.dtype(x.args[0]) == dtype:
        return x.args[0]
    return x if tools.dtype(x) == dtype else emit.call(aten.view.dtype, x, dtype)


def transposed(emit: StepEmitter, x: fx.Node) -> fx.Node:
    """``x`` with its two dims swapped (a view)."""
    return emit.call(aten.permute.default, x, [1, 0])


def rows_in_place(emit: StepEmitter, x: fx.Node, sharded: ShardedDim, from_ranks: bool) -> fx.Node:
    """``x [rows, columns]`` with its rows moved from the ranks' order to the tensor's; if not ``from_ranks``, from the
    tensor's order to the ranks'."""
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

# SPDX-License-Identifier: Apache-2.0
"""Write a sum of views as a sum of ``[T, H]``.

The ranks divide the first dim of ``[T, H]``. A view ``[B, S, H]`` between a matmul and its reduce-scatter splits the
dim of the ranks if they do not divide the batch B. Then the finders take no site. So the terms are viewed::

    s = add(view(mm1, [B, S, H]), view(mm2, [B, S, H]))     ->     s = add(mm1, mm2)
    reduce_scatter(view(s, [T, H]))                                reduce_scatter(s)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.rules import Held
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size

aten = torch.ops.aten


def views_split_ranks(dims: list[Any], world_size: int) -> bool:
    """Whether the first of the token dims ``dims``, such as ``[B, S]``, is a batch that the ranks do not divide. Dims
    of size 1 do not count."""
    batch = next((size for size in dims[:-1] if not same_size(size, 1)), None)
    return batch is not None and not same_size(batch % world_size, 0)


def flat_sum(node: fx.Node, shape: list[Any], held: Held, writer: Writer) -> fx.Node:
    """``node`` viewed as ``shape``, which is ``[T, H]``. The order of the additions stays. A sum that is held as rows
    is not taken apart, because the rewrite gathers its rows for this reader."""
    sums, pending = set[fx.Node](), [node]
    while pending:
        term = pending.pop()
        if term not in sums and term not in held and _is_sum(term):
            sums.add(term)
            pending += term.all_input_nodes
    flat: dict[fx.Node, fx.Node] = {}

    def viewed(term: Any) -> fx.Node:
        return flat[term] if term in flat else writer.reshape(term, shape)

    for term in sorted(sums):
        flat[term] = writer.call(aten.add.Tensor, *(viewed(t) for t in term.args))
    return viewed(node)


def _is_sum(node: fx.Node) -> bool:
    """Whether ``node`` adds tensors of its own shape and dtype and has one user."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.users) != 1:
        return False
    dtype = tools.dtype(node)
    return all(tools.is_tensor(t) and tools.same_shape(t, node) and tools.dtype(t) == dtype for t in node.args)

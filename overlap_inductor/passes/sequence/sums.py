# SPDX-License-Identifier: Apache-2.0
"""Reductions over all tokens of a tensor that is held as rows: each rank reduces its rows, then the ranks combine their
results. An example is the gradient of a norm's weight, with ``t`` rows on each rank::

    sum(x [B, S, H], [0, 1])   ->   wait(all_reduce(sum(x [t, H], 0)))

A sum in a floating type of fewer than 32 bits is added in fp32, and rounded once at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import is_one
from overlap_inductor.passes.sequence.rules import Held
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.rules import reduced_dims
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.torch_compat import operators

aten = tools.aten
overlap = torch.ops.overlap_inductor

REDUCE_OPS = {
    aten.sum.dim_IntList: "sum",
    aten.sum.default: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.default: "max",
    aten.min.default: "min",
}
"""For each reduction, the operation that combines the ranks' parts."""
EXTREMA = {"max": aten.amax.default, "min": aten.amin.default}
"""The ops of a maximum or minimum over a rank's rows, and over the ranks' parts."""


def reduces_tokens(node: fx.Node, held: Held) -> bool:
    """Whether ``node`` reduces all tokens of an input that is held as rows. Raises ``NotRowWise`` if ``node``
    reduces only some of the token dims, or if rows beyond the last token would change the result."""
    if node.target not in REDUCE_OPS or (source := _source(node)) not in held:
        return False
    rows, shape = held[source], tools.shape(source)
    dims = reduced_dims(node, len(shape))
    if not any(d < rows.lead and not is_one(shape[d]) for d in dims):
        return False
    if any(d not in dims and not is_one(shape[d]) for d in range(rows.lead)):
        raise NotRowWise(f"{node.target} reduces some tokens and keeps others apart")
    if REDUCE_OPS[node.target] != "sum" and not rows.tokens.even:
        raise NotRowWise(f"{node.target} would read the rows beyond the last token")
    return True


def write_partial(node: fx.Node, rows: Rows, writer: Writer) -> fx.Node:
    """Write this rank's part of ``node``. ``rows``: how the input is held."""
    local = writer.rows(_source(node))
    tokens = rows.tokens
    if not tokens.even:
        where = (0, 0, writer.size(tokens.shard), 0, writer.size(tokens.count), tokens.group_name)
        local = writer.call(overlap.rows_below.default, local, *where)
    first = rows.lead - 1
    dims = sorted({max(d - first, 0) for d in reduced_dims(node, len(tools.shape(_source(node))))})
    if REDUCE_OPS[node.target] in EXTREMA:
        return writer.call(EXTREMA[REDUCE_OPS[node.target]], local, dims)
    return writer.call(
        aten.sum.dim_IntList, local, dims, False, dtype=wide(operators.argument(node, "dtype") or tools.dtype(node))
    )


def write_result(node: fx.Node, combined: fx.Node, writer: Writer) -> fx.Node:
    """Write the value of ``node`` from ``combined``, the combined parts of the ranks."""
    if tools.dtype(combined) != tools.dtype(node):
        combined = writer.call(torch.ops.prims.convert_element_type.default, combined, tools.dtype(node))
    return writer.reshape(combined, tools.shape(node))


def _source(node: fx.Node) -> Any:
    return node.args[0]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of ``dtype`` are added."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

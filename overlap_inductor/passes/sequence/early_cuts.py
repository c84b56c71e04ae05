# SPDX-License-Identifier: Apache-2.0
"""Cut a tensor to rows before its elementwise ops, so that the forward saves fewer rows for the backward.

The backward of a norm on rows reads several tensors that are computed from one input ``x [T, H]`` of the graph. The
partitioner saves each result of ``take``, because it does not know how costly ``take`` is::

    a = take(mul(x, r)); b = take(mul(x, 2))      ->   c = take(x); a = mul(c, take(r)); b = mul(c, 2)
    saved: a, b [t, H]                                 saved: c [t, H] and take(r) [t, 1]
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rows import is_one
from overlap_inductor.passes.sequence.rules import Held
from overlap_inductor.passes.sequence.rules import Writer
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.passes.sequence.rules import same_op
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

MOST_BYTES = 1.25
"""The inputs' rows may have this many times as many bytes as the result's rows."""
DEEPEST = 8
"""The most elementwise ops in a row that are computed from cut inputs."""


def cut_early(node: fx.Node, tokens: Tokens, ahead: int, held: Held, writer: Writer) -> fx.Node | None:
    """The rank's rows of ``node``, computed from the rows of its inputs. The first ``ahead`` dims of ``node`` are token
    dims. ``None`` if ``node`` is not elementwise, or if its inputs are held as rows or have too many bytes.

    Rows beyond the last token are zero. An op on integers may raise an error for them, so it is not computed early if
    there may be such rows."""
    if node.op != "call_function" or not tools.is_pointwise(node) or operators.is_mutable(node):
        return None
    if rule_of(node) is None or not tools.is_tensor(node):
        return None
    shape = tools.shape(node)
    inputs = list(tools.tensor_inputs(node))
    if any(i in held for i in inputs) or not same_size(tools.numel(shape[:ahead]), tokens.count):
        return None
    cut = []
    for source in inputs:
        own = tools.shape(source)
        lead = len(own) - (len(shape) - ahead)
        if lead <= 0 or all(map(is_one, own[:lead])):
            continue
        if not all(map(same_size, own[:lead], shape[ahead - lead : ahead])):
            return None
        dtype = tools.dtype(source)
        if not tokens.even and not dtype.is_floating_point and dtype != torch.bool:
            return None
        cut.append(_bytes(source, lead))
    if not cut or not sum(cut) <= MOST_BYTES * _bytes(node, ahead):
        return None
    return same_op(node, Rows(tokens, ahead), held, writer)


def _bytes(node: fx.Node, lead: int) -> float:
    """Bytes of a token's features. Infinite if a size is symbolic."""
    size = tools.numel(tools.shape(node)[lead:])
    return size * tools.dtype(node).itemsize if isinstance(size, int) else float("inf")

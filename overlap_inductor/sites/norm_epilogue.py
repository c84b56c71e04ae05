# SPDX-License-Identifier: Apache-2.0
"""Find the residual add and RMSNorm after an all-reduce. Schedule ``small_message`` computes them in its kernel.

The finder recognises the norm of Llama and related models. ``added`` is fp16 or bf16::

    added  = residual + all_reduce(...)                 # in either order; also an output: the next residual
    wide   = added.to(fp32)
    scaled = wide * rsqrt(mean(wide ** 2, last dim) + eps)
    normed = weight * scaled.to(added.dtype)            # in either order
    ->  normed, added = one op                          # by the rewrite

Reshapes to and from rows may come in between. ``torch.nn.RMSNorm`` multiplies by its weight before it rounds. This
gives other bits, so the norm of ``torch.nn.RMSNorm`` is not recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = tools.aten


@dataclass(frozen=True)
class NormEpilogue:
    """What the op of ``small_message`` reads besides the matmul's operands, and the nodes that the op replaces.

    Attributes:
        residual: tensor of the all-reduce's shape and dtype.
        weight: one row of the all-reduce's dtype.
        eps: the number added to the mean of squares.
        normed: the norm's result.
        residual_out: the sum of residual and all-reduce. Everything that the op reads comes before this node.
    """

    residual: fx.Node
    weight: fx.Node
    eps: float
    normed: fx.Node
    residual_out: fx.Node


def find_norm(result: fx.Node) -> NormEpilogue | None:
    """The residual add and norm after the all-reduce ``result``. ``None`` if there are none or ``result`` has another
    reader."""
    while len(result.users) == 1 and _keeps_rows(user := next(iter(result.users))):
        result = user
    added = next(iter(result.users), None)
    if (
        len(result.users) != 1
        or added is None
        or added.target is not aten.add.Tensor
        or operators.argument(added, "alpha") != 1
    ):
        return None
    a, b = operators.argument(added, "self"), operators.argument(added, "other")
    residual = b if a is result else a
    if residual is result or not _alike(residual, result) or tools.dtype(result) not in (torch.float16, torch.bfloat16):
        return None
    found = [match for node in _behind(added, 8) if (match := _norm(node, added)) is not None]
    if len(found) != 1:
        return None
    weight, eps, normed = found[0]
    return NormEpilogue(residual, weight, eps, normed, added) if residual < added and weight < added else None


def _norm(normed: fx.Node, added: fx.Node) -> tuple[fx.Node, float, fx.Node] | None:
    """``(weight, eps, normed)`` if ``normed`` is the norm of ``added``, else ``None``. No other node may read a node in
    between."""
    for rounded, weight in _factors(normed):
        rounded = _rows(rounded)
        if (
            not _is_row(weight, normed)
            or tools.dtype(weight) != tools.dtype(added)
            or not _casts(rounded, tools.dtype(added))
            or len(rounded.users) != 1
        ):
            continue
        scaled = _rows(rounded.args[0])
        for wide, inverse in _factors(scaled):
            eps = _eps_of(inverse, wide)
            if (
                eps is not None
                and _casts(wide, torch.float32)
                and _rows(wide.args[0]) is added
                and len(scaled.users) == 1
                and len(wide.users) == 2
            ):
                return weight, eps, normed
    return None


def _eps_of(inverse: fx.Node, wide: fx.Node) -> float | None:
    """``eps`` if ``inverse`` is ``rsqrt(mean(wide ** 2) + eps)`` of each row, else ``None``. Nodes after ``wide`` must
    have one reader each."""
    chain = [inverse]
    for target in (aten.rsqrt.default, aten.add.Tensor, aten.mean.dim):
        if chain[-1].target is not target or len(chain[-1].users) != 1 or not tools.is_tensor(chain[-1].args[0]):
            return None
        chain.append(chain[-1].args[0])
    _, shifted, mean, squares = chain
    eps = operators.argument(shifted, "other")
    dims, last = operators.argument(mean, "dim"), len(tools.shape(wide)) - 1
    if (
        not isinstance(eps, (int, float))
        or operators.argument(shifted, "alpha") != 1
        or not operators.argument(mean, "keepdim")
    ):
        return None
    if [d % (last + 1) for d in dims or ()] != [last] or tools.dtype(mean) != torch.float32 or len(squares.users) != 1:
        return None
    power = squares.target is aten.pow.Tensor_Scalar and squares.args[0] is wide and squares.args[1] == 2
    product = squares.target is aten.mul.Tensor and squares.args[0] is wide and squares.args[1] is wide
    return float(eps) if power or product else None


def _factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """If ``node`` is a product of two tensors, both orders of its factors; else nothing."""
    if node.target is aten.mul.Tensor and all(tools.is_tensor(a) for a in node.args):
        a, b = node.args
        yield a, b
        yield b, a


def _behind(node: fx.Node, depth: int) -> set[fx.Node]:
    """The products that are computed from ``node`` in at most ``depth`` steps."""
    reached = layer = {node}
    for _ in range(depth):
        layer = {user for n in layer for user in n.users} - reached
        reached = reached | layer
    return {n for n in reached if n.target is aten.mul.Tensor}


def _keeps_rows(node: fx.Node) -> bool:
    return tools.is_reshape(node) and same_size(tools.shape(node)[-1], tools.shape(node.args[0])[-1])


def _rows(node: Any) -> fx.Node:
    """``node`` without views that have one reader and keep the length of rows."""
    while _keeps_rows(node) and len(node.users) == 1:
        node = node.args[0]
    return node


def _casts(node: fx.Node, dtype: torch.dtype) -> bool:
    return (
        tools.is_cast(node)
        and tools.dtype(node) == dtype
        and tools.is_tensor(node.args[0])
        and tools.dtype(node.args[0]) != dtype
    )


def _alike(a: Any, b: fx.Node) -> bool:
    if not tools.is_tensor(a) or tools.dtype(a) != tools.dtype(b) or len(tools.shape(a)) != len(tools.shape(b)):
        return False
    return all(same_size(s, t) for s, t in zip(tools.shape(a), tools.shape(b), strict=True))


def _is_row(weight: fx.Node, normed: fx.Node) -> bool:
    """Whether ``weight`` is one row that all rows of ``normed`` share."""
    *leading, columns = tools.shape(weight) or [0]
    return (
        same_size(columns, tools.shape(normed)[-1])
        and all(same_size(s, 1) for s in leading)
        and len(leading) < len(tools.shape(normed))
    )

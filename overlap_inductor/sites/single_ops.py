# SPDX-License-Identifier: Apache-2.0
"""Recognise ``silu`` and ``silu_backward`` in the ops into which Inductor decomposes them.

A ``RowProgram`` runs op by op. The ops of a decomposed ``silu`` write six tensors, most of them in fp32. One op writes
one tensor, in bf16::

    f = to_fp32(x)
    y = to_bf16(f / (exp(-f) + 1))    ->    y = silu(x)

In bf16, the single op and its decomposition compute the same in fp32 and round once. On CPUs, they give the same bits
(``tests/unit/test_single_ops.py``). In other dtypes, nothing is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default


def _wide(name: str) -> tuple[Any, ...]:
    return (_CAST, name, torch.float32)


_SIGMOID = (aten.sigmoid.default, _wide("x"))
_SLOPE = (aten.add.Tensor, (aten.mul.Tensor, _wide("x"), (aten.sub.Tensor, 1, _SIGMOID)), 1)
_DECOMPOSED: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "aten.silu.default": (
        ("x",),
        (aten.div.Tensor, _wide("x"), (aten.add.Tensor, (aten.exp.default, (aten.neg.default, _wide("x"))), 1)),
    ),
    "aten.silu_backward.default": (
        ("gradient", "x"),
        (aten.mul.Tensor, (aten.mul.Tensor, _wide("gradient"), _SIGMOID), _SLOPE),
    ),
}
"""``{op: (its arguments, how it is decomposed before the cast to bf16)}``. A tuple is a call: the op, then its
arguments. A string is the name of a tensor."""


@dataclass(frozen=True)
class SingleOp:
    """``name(*inputs)``: a call of one op that has the same result as several nodes."""

    name: str
    inputs: tuple[fx.Node, ...]


def single_op(node: fx.Node) -> SingleOp | None:
    """The single op that has the same result as ``node`` and nodes before it, or ``None``."""
    for op, (names, decomposed) in _DECOMPOSED.items():
        found: dict[str, fx.Node] = {}
        if not _matches((_CAST, decomposed, torch.bfloat16), node, found):
            continue
        inputs = tuple(found[name] for name in names)
        if all(tools.dtype(n) == torch.bfloat16 and tools.same_shape(n, node) for n in inputs):
            return SingleOp(op, inputs)
    return None


def _matches(pattern: Any, value: Any, found: dict[str, fx.Node]) -> bool:
    """Whether ``value`` is computed as ``pattern`` says. ``found`` gets the tensor of each name."""
    if isinstance(pattern, str):
        return tools.is_tensor(value) and found.setdefault(pattern, value) is value
    if not isinstance(pattern, tuple):
        return type(value) is type(pattern) and value == pattern
    if not isinstance(value, fx.Node) or value.target is not pattern[0] or value.kwargs:
        return False
    arguments = pattern[1:]
    return len(arguments) == len(value.args) and all(
        _matches(p, v, found) for p, v in zip(arguments, value.args, strict=True)
    )

# SPDX-License-Identifier: Apache-2.0
"""Reads which operator a node calls, the operator's arguments, and which arguments the operator writes. This module is
in ``torch_compat``, because the type of an operator (``torch._ops.OpOverload``) is private in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of collectives that return their result."""


def operator(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator (``OpOverload``) that ``node`` calls, or ``None``, for example for an input or an output."""
    target = node.target
    return target if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else None


def qualified_name(node: fx.Node) -> tuple[str, str]:
    """Namespace and name without the overload, ``("aten", "mm")``; two empty strings if ``node`` calls no operator."""
    op = operator(node)
    namespace, _, name = op._schema.name.partition("::") if op is not None else ("", "", "")
    return namespace, name


def full_name(node: fx.Node) -> str:
    """Namespace, name and overload, for example ``aten.mm.default``. Empty if ``node`` calls no operator."""
    op = operator(node)
    return ".".join((*qualified_name(node), op._overloadname)) if op is not None else ""


def is_functional_collective(node: fx.Node) -> bool:
    return qualified_name(node)[0] in FUNCTIONAL_COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    return qualified_name(node) == ("_c10d_functional", "wait_tensor")


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument that the schema calls ``name``, by position or by keyword. If not passed: the schema's default, else
    ``default``."""
    op = operator(node)
    for position, schema in enumerate(op._schema.arguments if op is not None else ()):
        if schema.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, schema.default_value if schema.has_default_value() else default)
    return node.kwargs.get(name, default)


def with_arguments(node: fx.Node, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``node``, positional and by keyword. An argument whose name is a key of ``values`` gets the
    value of this key."""
    op = operator(node)
    names = [a.name for a in op._schema.arguments][: len(node.args)] if op is not None else []
    args = tuple(values.get(name, given) for name, given in zip(names, node.args, strict=True))
    return args, {**node.kwargs, **{name: value for name, value in values.items() if name not in names}}


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    op = operator(node)
    return op is not None and tag in op.tags


def is_mutable(node: fx.Node) -> bool:
    op = operator(node)
    return op is not None and op._schema.is_mutable


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the operator writes in place, those in lists included."""
    op = operator(node)
    names = (
        [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if op is not None
        else []
    )
    return [value for value in leaves([argument(node, name) for name in names]) if isinstance(value, fx.Node)]


def leaves(values: Any) -> list[Any]:
    return _pytree.tree_leaves(values)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [v for v in _pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


def fake_mode(values: Any) -> Any:
    """The ``FakeTensorMode`` of the first fake tensor in ``values``. Raises ``StopIteration`` if there is none."""
    return next(v.fake_mode for v in _pytree.tree_leaves(values) if isinstance(v, torch._subclasses.FakeTensor))


def lowering_name(node: fx.Node) -> str | None:
    """The name of the Inductor lowering that ``node`` calls, or ``None``. Inductor's patterns write such nodes."""
    return node.target.__name__ if getattr(node.target, "_inductor_lowering_function", False) else None


def summed_matmuls(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """The four operands, if Inductor wrote ``node`` for ``mat1 @ mat2 + mat3 @ mat4``; else ``None``."""
    known = lowering_name(node) == "mm_plus_mm" and tuple(node.kwargs) == ("mat1", "mat2", "mat3", "mat4")
    return tuple(node.kwargs.values()) if known else None

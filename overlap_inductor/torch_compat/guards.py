# SPDX-License-Identifier: Apache-2.0
"""Compares symbolic sizes. Only ``decide`` adds guards to the compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_guards(shape_env: Any | None) -> Iterator[None]:
    """In this context, a comparison of symbolic sizes adds no guard. ``guard_or_false`` and ``guard_or_true`` do not
    look at the sizes of the first call.

    Suppressing guards alone is not enough. A chunk of ``s // 8`` rows has one row if the first call has 8 tokens. A
    fake function could then write the size 1 into the shape, which is wrong for later calls.

    ``shape_env``: the graph's ``ShapeEnv``; ``None`` if all sizes are ints.
    """
    if shape_env is None:
        yield
        return
    from torch.fx.experimental import _config

    with shape_env.suppress_guards(), _config.patch(backed_size_oblivious=True):
        yield


def same_expression(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal after their products are expanded. Adds no guard."""
    import sympy

    one, other = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (a, b))
    return bool(sympy.expand(one - other) == 0)


def same_without_floors(a: Any, b: Any) -> bool:
    """Whether two sizes are equal because a division leaves no remainder. ``2 * (s0 // 2)`` is ``s0`` if a guard says
    that ``s0`` is even. Adds no guard."""
    import sympy
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._sympy.functions import FloorDiv
    from torch.utils._sympy.functions import Mod

    symbolic = [n for n in (a, b) if isinstance(n, torch.SymInt)]
    expressions = [n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (a, b)]
    if not any(e.has(FloorDiv) for e in expressions):
        return False
    env = symbolic[0].node.shape_env

    def divided(base: Any, divisor: Any) -> Any:
        remainder = env.create_symintnode(Mod(base, divisor), hint=None)
        return base / divisor if statically_known_true(remainder == 0) else FloorDiv(base, divisor)

    one, other = (e.replace(FloorDiv, divided) for e in expressions)
    return bool(sympy.expand(one - other) == 0)


def surely(condition: Any) -> bool:
    """Whether ``condition``, a bool or ``SymBool``, is known to be true for all sizes that the graph serves. Adds no
    guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def decide(condition: Any) -> bool:
    """Decide ``condition``, a bool or ``SymBool``, by the sizes of the first call. A ``SymBool``'s answer becomes a
    guard.

    If the program states the bounds of one of the sizes (``mark_dynamic(x, 0, min=2, max=8192)``), torch allows no
    guard that these bounds do not imply. Then no guard is added, and the answer is whether the condition surely holds.
    """
    return bool(condition) if may_decide(condition) else surely(condition)


def may_decide(condition: Any) -> bool:
    """Whether ``decide`` may add a guard for ``condition``: the program states no bounds of its sizes."""
    if not isinstance(condition, torch.SymBool):
        return True
    symbols = condition.node.expr.free_symbols
    tracked = getattr(condition.node.shape_env, "tracked_fakes", None) or []
    bounded = (s for t in tracked for s in _bounded(t.fake, t.symbolic_context))
    return all(symbols.isdisjoint(size.node.expr.free_symbols) for size in bounded)


def _bounded(fake: Any, context: Any) -> Iterator[torch.SymInt]:
    """The symbolic sizes of ``fake``, and of the tensors in a subclass such as ``DTensor``, whose bounds the program
    states."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    stated = getattr(context, "constraint_sizes", None) or []
    for size, constraint in zip(getattr(fake, "shape", ()), stated, strict=False):
        if isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
            yield size
    for name, inner in (getattr(context, "inner_contexts", None) or {}).items():
        yield from _bounded(getattr(fake, name, None), inner)

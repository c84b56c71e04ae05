# SPDX-License-Identifier: Apache-2.0
"""``Epilogue``: pointwise ops that a kernel computes on each tile of a result. ``applied`` computes them with torch.

An ``Epilogue`` holds a program, and the kinds of the extra tensors that the program reads besides the result. Each op
of the program assigns one new value. The last value takes the place of the result. A custom op gets its epilogues as
JSON text: a list with one entry for each result. The entry of the epilogue ``silu(x) * e0`` is::

    {"extras": ["full"],
     "ops": [["neg", "x"], ["exp", "t0"], ["add", "t1", 1.0], ["div", "x", "t2"], ["mul", "t3", "e0"]]}

- ``x``: the result of the matmul or reduction, rounded to its dtype;
- ``e0``, ``e1``, ...: the extras;
- ``t0``, ``t1``, ...: the results of the ops, in order.

Ops compute in fp32. Values are rounded only by op ``to`` and at the end. This module uses neither Triton nor FX.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Argument = str | int | float

TORCH_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "add": operator.add,
    "div": operator.truediv,
    "exp": torch.exp,
    "maximum": lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=torch.float32, device=a.device)),
    "minimum": lambda a, b: torch.minimum(a, torch.as_tensor(b, dtype=torch.float32, device=a.device)),
    "mul": operator.mul,
    "neg": torch.neg,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sub": operator.sub,
    "to": lambda a, dtype: a.to(getattr(torch, dtype)).float(),
}
"""Ops on fp32 tensors. At most one argument is a number. For ``maximum`` and ``minimum``, only the second argument may
be a number. ``to`` takes the name of a dtype."""


@dataclass(frozen=True)
class Epilogue:
    """An epilogue of a result ``[M, N]``.

    Attributes:
        extras: the kind of each extra tensor: ``full`` (shape ``[M, N]``), ``row`` (``[N]``), ``column`` (``[M]``) or
            ``scalar`` (``[1]``).
        ops: the program: ``(name of the op, arguments...)`` for each op.
    """

    extras: tuple[str, ...]
    ops: tuple[tuple[Argument, ...], ...]

    def __str__(self) -> str:
        """``e0 full: mul(x, e0)``, for reports."""
        head = ", ".join(f"e{i} {kind}" for i, kind in enumerate(self.extras))
        ops = ", ".join(f"{name}({', '.join(str(a) for a in arguments)})" for name, *arguments in self.ops)
        return f"{head}: {ops}" if head else ops


def to_text(epilogues: Sequence[Epilogue | None]) -> str:
    """The epilogues of an op's results as JSON. The op takes the extras of all its results in one list, in the order
    of ``epilogues``."""
    return json.dumps([None if e is None else {"extras": e.extras, "ops": e.ops} for e in epilogues])


@functools.cache
def from_text(text: str) -> tuple[Epilogue | None, ...]:
    return tuple(
        None if e is None else Epilogue(tuple(e["extras"]), tuple(map(tuple, e["ops"]))) for e in json.loads(text)
    )


def extras_of(epilogues: Sequence[Epilogue | None], extras: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split the ``extras`` of all results: one list for each result."""
    counts = [0 if e is None else len(e.extras) for e in epilogues]
    return [list(extras[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]


def applied(epilogue: Epilogue | None, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
    """The epilogue of ``x [M, N]``, computed with torch's ops in fp32. The result has the dtype of ``x``."""
    if epilogue is None:
        return x
    values: dict[Any, torch.Tensor] = {"x": x.float()}
    for i, (kind, extra) in enumerate(zip(epilogue.extras, extras, strict=True)):
        values[f"e{i}"] = extra.float()[:, None] if kind == "column" else extra.float()
    for i, (name, *arguments) in enumerate(epilogue.ops):
        given = [values.get(a, a) for a in arguments]
        values[f"t{i}"] = TORCH_OPS[str(name)](*given)
    return values[f"t{len(epilogue.ops) - 1}"].to(x.dtype)

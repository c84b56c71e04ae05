# SPDX-License-Identifier: Apache-2.0
"""``RowProgram``: the ops by which experts compute rows (``sites.row_steps``), as text.

An op of this package runs the program on some of the rows at a time. ``_grouped_mm(r0, w0, ends) * r1`` is::

    {"ops": [["aten._grouped_mm.default", [{"row": 0}, {"whole": 0}, {"ends": 0}], {}],
             ["aten.mul.Tensor", [{"row": 2}, {"row": 1}], {}]],
     "result": 3, "width": 4096, "dtype": "bfloat16", "handed_out": []}

- ``row`` values: first the tensors of rows that the program gets, then the results of the ops;
- ``whole`` tensors serve all rows;
- ``ends``: where the rows of each expert end.

Op ``getitem`` takes an element of a list. This module does not use FX.
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

GETITEM, OWN = "getitem", "overlap_inductor."
_Argument = Callable[[Sequence[Any], Sequence[torch.Tensor], torch.Tensor], Any]


@dataclass(frozen=True)
class HandedOut:
    """A value that nodes outside the program also read. ``value``: its number. ``sizes``: its dims after the rows."""

    value: int
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RowProgram:
    """See the module.

    Attributes:
        ops: name, arguments and keyword arguments of each op.
        result: the number of the value that is the program's result (``run`` returns all values).
        width, dtype: the row size and the dtype of this value.
    """

    ops: tuple[tuple[str, Any, Any], ...]
    result: int
    width: int
    dtype: str
    handed_out: tuple[HandedOut, ...]

    def to_text(self) -> str:
        handed_out = [[h.value, h.sizes, h.dtype] for h in self.handed_out]
        return json.dumps(
            {
                "ops": self.ops,
                "result": self.result,
                "width": self.width,
                "dtype": self.dtype,
                "handed_out": handed_out,
            }
        )

    def run(
        self,
        rows: Sequence[torch.Tensor],
        whole: Sequence[torch.Tensor],
        ends: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> list[Any]:
        """Compute all values for some rows, and return them by number. The rows must be sorted by expert. If the
        program ``stores``, the result is stored in ``out``."""
        values = list(rows)
        stored = self.result - len(values) if out is not None else -1
        for number, (op, arguments, keywords) in enumerate(self._calls):
            given = [argument(values, whole, ends) for argument in arguments]
            if number == stored:
                values.append(_storing(self.ops[number][0])(*given, out=out))
            else:
                values.append(op(*given, **{name: value(values, whole, ends) for name, value in keywords}))
        return values

    def stores(self, given: int) -> bool:
        """Whether ``run`` can store the result in a given tensor. ``given``: number of the program's rows."""
        return self.result >= given and _storing(self.ops[self.result - given][0]) is not None

    @functools.cached_property
    def _calls(self) -> list[tuple[Any, list[_Argument], list[tuple[str, _Argument]]]]:
        """Each op with functions that return its arguments. They are made once, because ``run`` must take little host
        time."""
        return [
            (_operator(name), [_argument(a) for a in arguments], [(k, _argument(v)) for k, v in keywords.items()])
            for name, arguments, keywords in self.ops
        ]


@functools.cache
def from_text(text: str) -> RowProgram:
    read = json.loads(text)
    handed_out = tuple(HandedOut(value, tuple(sizes), dtype) for value, sizes, dtype in read["handed_out"])
    return RowProgram(tuple(map(tuple, read["ops"])), read["result"], read["width"], read["dtype"], handed_out)


def encoded_dtype(dtype: torch.dtype) -> dict[str, str]:
    return {"dtype": dtype_name(dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _operator(name: str) -> Any:
    if name == GETITEM:
        return operator.getitem
    return getattr(_packet(name), name.split(".")[2])


@functools.cache
def _storing(name: str) -> Any:
    """The overload of this package's op that stores its result, or ``None``."""
    return getattr(_packet(name), "out", None) if name.startswith(OWN) else None


def _packet(name: str) -> Any:
    namespace, called, _ = name.split(".")
    return getattr(getattr(torch.ops, namespace), called)


def _argument(value: Any) -> _Argument:
    """A function that returns the argument ``value`` of an op, from the values, the whole tensors and the ends."""
    if isinstance(value, list | tuple):
        parts = [_argument(v) for v in value]
        return lambda *given: [part(*given) for part in parts]
    if isinstance(value, dict):
        if len(value) != 1:
            raise ValueError(f"an experts' op has the argument {value}; expected a tensor's number or a dtype")
        ((kind, number),) = value.items()
        if kind == "row":
            return lambda values, whole, ends: values[number]
        if kind == "whole":
            return lambda values, whole, ends: whole[number]
        if kind == "ends":
            return lambda values, whole, ends: ends
        if kind == "dtype":
            value = getattr(torch, number)
    return lambda values, whole, ends: value

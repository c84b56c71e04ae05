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

GETITEM = "getitem"
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

    def run(self, rows: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], ends: torch.Tensor) -> list[Any]:
        """Compute all values for some rows, and return them by number. The rows must be sorted by expert."""
        values = list(rows)
        for op, arguments, keywords in self._calls:
            given = [argument(values, whole, ends) for argument in arguments]
            values.append(op(*given, **{name: value(values, whole, ends) for name, value in keywords}))
        return values

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
    namespace, called, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), called), overload)


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

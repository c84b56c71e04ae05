# SPDX-License-Identifier: Apache-2.0
"""``silu(x) * y`` as one op of a ``RowProgram``, for the gated experts of most models::

r3 = silu(r0)                    r3 = [r0][0]     # no work; later values keep their numbers
r4 = mul(r3, r1)          ->     r4 = chunked_silu_times(r0, r1, ends)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from overlap_inductor.sites.row_program import GETITEM
from overlap_inductor.sites.row_program import RowProgram

SILU, MUL, GATE = "aten.silu.default", "aten.mul.Tensor", "overlap_inductor.chunked_silu_times.default"


def gated(program: RowProgram, given: int) -> RowProgram:
    """``program`` with one op for each ``silu(x) * y`` whose ``silu(x)`` nothing else reads. ``given``: number of the
    program's rows."""
    ops = list(program.ops)
    reads = Counter(number for op in ops for number in _rows_read(op[1:]))
    kept = {program.result, *(h.value for h in program.handed_out)}
    for number, (name, arguments, keywords) in enumerate(ops):
        if name != MUL or keywords or not all(map(_is_row, arguments)):
            continue
        numbers = [argument["row"] for argument in arguments]
        for silu, other in (numbers, numbers[::-1]):
            if silu < given or reads[silu] != 1 or silu in kept:
                continue
            before, (x, *_), _ = ops[silu - given]
            if before == SILU:
                ops[silu - given] = (GETITEM, [[x], 0], {})
                ops[number] = (GATE, [x, {"row": other}, {"ends": 0}], {})
                break
    return dataclasses.replace(program, ops=tuple(ops))


def _is_row(argument: Any) -> bool:
    return isinstance(argument, dict) and argument.keys() == {"row"}


def _rows_read(value: Any) -> list[int]:
    """The numbers of the rows in arguments of an op, each as often as it is read."""
    if _is_row(value):
        return [value["row"]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [number for part in parts for number in _rows_read(part)]

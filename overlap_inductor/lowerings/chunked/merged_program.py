# SPDX-License-Identifier: Apache-2.0
"""Writes the ops of a ``RowProgram`` as fewer launches, for the gated experts of most models::

    r1 = _grouped_mm(r0, w0, ends)
    r2 = silu(r1)                     ->
    r3 = _grouped_mm(r0, w1, ends)
    r4 = mul(r2, r3)                         r4 = chunked_gated_grouped_mm(r0, w0, w1, ends)
    r5 = _grouped_mm(r4, w2, ends)           r5 = chunked_grouped_mm(r4, w2, ends)

In place of ``r1`` to ``r3`` stands an op without work, so that later values keep their numbers.
If other ops or nodes read a product, only ``silu`` and ``mul`` become one op: ``chunked_silu_times``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

from overlap_inductor.sites.row_program import GETITEM
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.sites.row_program import from_text

SILU, MUL, PRODUCT = "aten.silu.default", "aten.mul.Tensor", "aten._grouped_mm.default"
SILU_TIMES = "overlap_inductor.chunked_silu_times.default"
GROUPED = "overlap_inductor.chunked_grouped_mm.default"
GATED = "overlap_inductor.chunked_gated_grouped_mm.default"
Op = tuple[str, Any, Any]
ENDS = {"ends": 0}
NO_WORK: Op = GETITEM, [[0], 0], {}


def merged(program: RowProgram, given: int) -> RowProgram:
    """``program`` with fewer launches. ``given``: number of the program's rows."""
    kept = {program.result, *(h.value for h in program.handed_out)}
    ops = _with_gates(list(program.ops), given, kept)
    ops = _with_gated_products([_with_own_product(op) for op in ops], given, kept)
    return dataclasses.replace(program, ops=tuple(ops))


@functools.cache
def merged_from_text(text: str, given: int) -> RowProgram:
    """``merged`` for a program that is given as text."""
    return merged(from_text(text), given)


def _with_gates(ops: list[Op], given: int, kept: set[int]) -> list[Op]:
    """``ops`` with one op for each ``silu(x) * y`` whose ``silu(x)`` nothing else reads."""
    alone = _read_once(ops, kept)
    for number, (name, arguments, keywords) in enumerate(ops):
        if name != MUL or keywords or not all(_is("row", argument) for argument in arguments):
            continue
        numbers = [argument["row"] for argument in arguments]
        for silu, other in (numbers, numbers[::-1]):
            if silu < given or silu not in alone:
                continue
            before, (x, *_), _ = ops[silu - given]
            if before == SILU:
                ops[silu - given] = NO_WORK
                ops[number] = SILU_TIMES, [x, {"row": other}, ENDS], {}
                break
    return ops


def _with_own_product(op: Op) -> Op:
    """``op``, by this package's kernel if it multiplies rows by the experts' weights and does nothing else."""
    name, arguments, keywords = op
    plain = len(arguments) == 3 and all(map(_is, ("row", "whole", "ends"), arguments))
    return (GROUPED, arguments, {}) if name == PRODUCT and plain and not keywords else op


def _with_gated_products(ops: list[Op], given: int, kept: set[int]) -> list[Op]:
    """``ops`` with one op for each ``silu(x @ w) * (x @ v)`` whose products nothing else reads."""
    alone = _read_once(ops, kept)
    for number, (name, arguments, _) in enumerate(ops):
        products = [argument["row"] for argument in arguments[:2]] if name == SILU_TIMES else []
        if not products or any(p < given or p not in alone or ops[p - given][0] != GROUPED for p in products):
            continue
        (x, w, _), (other, v, _) = (ops[p - given][1] for p in products)
        if x == other:
            for p in products:
                ops[p - given] = NO_WORK
            ops[number] = GATED, [x, w, v, ENDS], {}
    return ops


def _is(kind: str, argument: Any) -> bool:
    return isinstance(argument, dict) and argument.keys() == {kind}


def _read_once(ops: list[Op], kept: set[int]) -> set[int]:
    """The numbers of the values that one argument of one op reads, and nothing else."""
    reads = Counter(number for op in ops for number in _rows_read(op[1:]))
    return {number for number, count in reads.items() if count == 1} - kept


def _rows_read(value: Any) -> list[int]:
    """The numbers of the rows in arguments of an op, each as often as it is read."""
    if _is("row", value):
        return [value["row"]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [number for part in parts for number in _rows_read(part)]

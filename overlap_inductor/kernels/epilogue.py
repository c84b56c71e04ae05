"""An epilogue of a tile, as a Triton function written for its program (``lowerings.epilogue_text`` says what a program is).

The function is an argument of the kernel that calls it, known when that is compiled: each program makes a kernel of its own. All values are fp32
tiles in the layout of the accumulator; extra tensors are read by ordinary loads, which need no order with anything: they are inputs of
the whole launch. Forward progress: it waits for nothing. CUDA graphs: it holds no address and no number but the program's.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

MOST_EXTRAS = 2
"""Extra tensors that a launch has room for."""

TRITON_OPS = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "div": "{0} / {1}",
    "exp": "tl.exp({0})",
    # (As torch's, also where an operand is no number.)
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "sigmoid": "tl.sigmoid({0})",
    "sub": "{0} - {1}",
    "to": "{0}.to(tl.{1}).to(tl.float32)",
}

_LOADS = {
    "full": "tl.load({0} + at_m[:, None].to(tl.int64) * columns + at_n[None, :], mask=inside_m[:, None] & (at_n < columns)[None, :], other=0.0)",
    "row": "tl.load({0} + at_n, mask=at_n < columns, other=0.0)[None, :]",
    "column": "tl.load({0} + at_m, mask=inside_m, other=0.0)[:, None]",
    "scalar": "tl.load({0})",
}


@triton.jit
def _halves(tile):
    """The left and the right half of a tile's columns."""
    BLOCK_M: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit
def _beside(left, right):
    BLOCK_M: tl.constexpr = left.shape[0]
    BLOCK_N: tl.constexpr = left.shape[1] * 2
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BLOCK_M, BLOCK_N))


@triton.jit
def by_quarters(EPILOGUE: tl.constexpr, tile, weight, at_m, inside_m, column, columns, extra0, extra1, dtype: tl.constexpr):
    """``tile`` with its epilogue, in ``dtype``. One quarter of its columns after the other: an op of a whole accumulator takes as many registers again."""
    QUARTER: tl.constexpr = tile.shape[1] // 4
    left, right = _halves(tile)
    a, b = _halves(left)
    c, d = _halves(right)
    at_n = column + tl.arange(0, QUARTER)
    a = EPILOGUE(a, weight, at_m, inside_m, at_n, columns, extra0, extra1).to(dtype)
    b = EPILOGUE(b, weight, at_m, inside_m, at_n + QUARTER, columns, extra0, extra1).to(dtype)
    c = EPILOGUE(c, weight, at_m, inside_m, at_n + 2 * QUARTER, columns, extra0, extra1).to(dtype)
    d = EPILOGUE(d, weight, at_m, inside_m, at_n + 3 * QUARTER, columns, extra0, extra1).to(dtype)
    return _beside(_beside(a, b), _beside(c, d))


Program = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]
"""Kinds of the extras, and the ops."""


def source_of(programs: Sequence[Program | None]) -> str:
    """The function's text: ``epilogue(x, weight, at_m, inside_m, at_n, columns, e0, e1)`` for weight ``i`` of a launch computes ``programs[i]``."""
    lines = ["def epilogue(x, weight, at_m, inside_m, at_n, columns, e0, e1):"]
    first = 0
    for i, program in enumerate(programs):
        if program is None:
            continue
        kinds, ops = program
        lines.append(f"    if weight == {i}:")
        lines += [f"        e{first + j}_{i} = {_LOADS[kind].format(f'e{first + j}')}.to(tl.float32)" for j, kind in enumerate(kinds)]
        names = {"x": "x"} | {f"e{j}": f"e{first + j}_{i}" for j in range(len(kinds))} | {f"t{j}": f"t{j}_{i}" for j in range(len(ops))}
        for j, (name, *arguments) in enumerate(ops):
            lines.append(f"        t{j}_{i} = {TRITON_OPS[name].format(*(names.get(a, a) for a in arguments))}")
        lines.append(f"        x = t{len(ops) - 1}_{i}")
        first += len(kinds)
    if first > MOST_EXTRAS:
        raise ValueError(f"the epilogues of a launch read {first} extra tensors; it has room for {MOST_EXTRAS}")
    return "\n".join([*lines, "    return x", ""])


@functools.cache
def function_of(programs: tuple[Program | None, ...]) -> Any:
    """``source_of`` as a Triton function."""
    source = source_of(programs)
    name = f"<epilogue {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source by its file's name, and an entry without a time is never looked for on disk.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": __name__, "tl": tl}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["epilogue"])

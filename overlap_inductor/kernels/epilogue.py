# SPDX-License-Identifier: Apache-2.0
"""Writes the Triton function that computes an epilogue on a tile. The function is written from the epilogue's program,
which lists the epilogue's ops and the kinds of tensors that they read (``sites.epilogue_program``).

The function is a compile-time argument of a kernel, so each program leads to a kernel of its own. All values are fp32.
The function's argument ``x`` is a part of a tile: a quarter of its columns (``by_quarters``), or some of its rows
(``matmul_all_reduce``). An *extra tensor* is another tensor that the epilogue reads. Of an extra tensor, the function
loads what this part needs: a tile, a row, a column or one number.

Memory ordering: none is needed, because extra tensors are inputs of the whole launch. Forward progress: the function
waits for nothing. CUDA graphs: the function holds no address.

A program comes from the text of an op's argument, and becomes code. So ``source_of`` accepts only known names and
finite numbers, and checks the syntax tree of its text.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import math
import re
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from overlap_inductor.facts.limits import MOST_EXTRAS

TRITON_OPS = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "div": "{0} / {1}",
    "exp": "tl.exp({0})",
    # NaN propagates, as in torch's ops.
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
    "full": (
        "tl.load({0} + at_m[:, None].to(tl.int64) * columns + at_n[None, :], mask=inside_m[:, None] & (at_n <"
        " columns)[None, :], other=0.0)"
    ),
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
    # The inverse of ``_halves``.
    BLOCK_M: tl.constexpr = left.shape[0]
    BLOCK_N: tl.constexpr = left.shape[1] * 2
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BLOCK_M, BLOCK_N))


@triton.jit
def by_quarters(
    EPILOGUE: tl.constexpr, tile, weight, at_m, inside_m, column, columns, extra0, extra1, dtype: tl.constexpr
):
    """``tile`` with its epilogue, in ``dtype``. Each quarter of the columns is computed by itself, because an op's
    result on the whole tile would take many registers."""
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
"""The kinds of a program's extra tensors, and its ops."""


DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes that op ``to`` may round to."""

_FUNCTIONS = {"abs", "exp", "load", "sigmoid", "where", "to", *DTYPES, "int64"}
"""Attributes that the written text may read: functions and dtypes of ``tl``, and ``to`` of a value."""
_PARAMETERS = ("x", "weight", "at_m", "inside_m", "at_n", "columns", "e0", "e1")
_OWN_NAME = re.compile(r"[et][0-9]+_[0-9]+")
_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.If, ast.Assign, ast.Return, ast.Name, ast.Load, ast.Store,
    ast.Attribute, ast.Call, ast.keyword, ast.Subscript, ast.Tuple, ast.Slice, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.USub, ast.Eq, ast.NotEq,
    ast.Lt, ast.Gt,
)  # fmt: skip


def _argument(value: object, names: dict[str, str], op: Sequence[object]) -> str:
    """The text of argument ``value`` of ``op``: its name in ``names``, or a finite number."""
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(value)
    raise ValueError(
        f"op {list(op)!r} of an epilogue reads {value!r}; expected a finite number or one of {', '.join(names)}. "
        "Compile the model anew."
    )


def _expression(op: Sequence[object], names: dict[str, str]) -> str:
    """The Triton text of one op. Each argument is a key of ``names`` or a number. Raises ``ValueError`` for an unknown
    op, argument or dtype."""
    name, *arguments = op
    template = TRITON_OPS.get(name) if isinstance(name, str) else None
    count = 0 if template is None else 1 + max(int(number) for number in re.findall(r"{(\d)}", template))
    if template is None or len(arguments) != count:
        raise ValueError(
            f"{list(op)!r} is no op of an epilogue; expected one of {', '.join(TRITON_OPS)}, with its arguments. "
            "Compile the model anew."
        )
    if name == "to":
        value, dtype = arguments
        if dtype not in DTYPES:
            raise ValueError(
                f"op {list(op)!r} of an epilogue rounds to {dtype!r}; expected one of {', '.join(DTYPES)}. "
                "Compile the model anew."
            )
        return template.format(_argument(value, names, op), dtype)
    return template.format(*(_argument(value, names, op) for value in arguments))


def source_of(programs: Sequence[Program | None]) -> str:
    """The text of the function ``epilogue(x, weight, at_m, inside_m, at_n, columns, e0, e1)``, which computes
    ``programs[i]`` if ``weight`` is ``i``. A launch multiplies by one or more matrices, its weights. ``programs[i]`` is
    the epilogue of the product with weight ``i``; ``None`` if there is no epilogue.

    Raises:
        ValueError: a program has no op, an op has a wrong number of arguments, or a number is not finite. Or an op, a
            kind or a name is unknown, or the programs read more than ``MOST_EXTRAS`` extra tensors.
    """
    lines = [f"def epilogue({', '.join(_PARAMETERS)}):"]
    first = 0
    for i, program in enumerate(programs):
        if program is None:
            continue
        kinds, ops = program
        unknown = [kind for kind in kinds if kind not in _LOADS]
        if unknown or not ops:
            raise ValueError(
                f"an epilogue has extra tensors of kinds {list(kinds)!r} and {len(ops)} ops; expected kinds among "
                f"{', '.join(_LOADS)}, and at least one op. Compile the model anew."
            )
        lines.append(f"    if weight == {i}:")
        lines += [
            f"        e{first + j}_{i} = {_LOADS[kind].format(f'e{first + j}')}.to(tl.float32)"
            for j, kind in enumerate(kinds)
        ]
        names = {"x": "x"} | {f"e{j}": f"e{first + j}_{i}" for j in range(len(kinds))}
        for j, op in enumerate(ops):
            lines.append(f"        t{j}_{i} = {_expression(op, names)}")
            names[f"t{j}"] = f"t{j}_{i}"
        lines.append(f"        x = t{len(ops) - 1}_{i}")
        first += len(kinds)
    if first > MOST_EXTRAS:
        raise ValueError(f"the epilogues of a launch read {first} extra tensors; a launch has room for {MOST_EXTRAS}")
    source = "\n".join([*lines, "    return x", ""])
    check_source(source)
    return source


def check_source(source: str) -> None:
    """Raises ``ValueError`` if the text holds a node that ``source_of`` never writes, such as a string or an unknown
    name."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        known = isinstance(node, _NODES)
        if isinstance(node, ast.Name):
            known = node.id in (*_PARAMETERS, "tl") or _OWN_NAME.fullmatch(node.id) is not None
        elif isinstance(node, ast.Attribute):
            of_tl = isinstance(node.value, ast.Name) and node.value.id == "tl"
            known = (
                node.attr in _FUNCTIONS and of_tl != (node.attr == "to") and not isinstance(node.value, ast.Attribute)
            )
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Attribute)
        elif isinstance(node, ast.Constant):
            known = (
                node.value is None
                or isinstance(node.value, int | float)
                and not isinstance(node.value, bool)
                and math.isfinite(node.value)
            )
        elif isinstance(node, ast.FunctionDef):
            known = node in tree.body and len(tree.body) == 1 and node.name == "epilogue" and not node.decorator_list
        if not known:
            raise ValueError(
                f"the text of an epilogue holds {ast.unparse(node)!r} ({type(node).__name__}), which no epilogue "
                "needs. Compile the model anew."
            )


@functools.cache
def function_of(programs: tuple[Program | None, ...]) -> Any:
    """The function whose text is ``source_of(programs)``, compiled by Triton."""
    source = source_of(programs)
    name = f"<epilogue {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source by its file name. Without a modification time, ``linecache`` keeps this entry.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": __name__, "tl": tl}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["epilogue"])

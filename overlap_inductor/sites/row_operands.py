# SPDX-License-Identifier: Apache-2.0
"""Write the nodes that compute experts' rows as a ``RowProgram``, and list the tensors that the program reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.row_program import GETITEM
from overlap_inductor.sites.row_program import HandedOut
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.sites.row_program import dtype_name
from overlap_inductor.sites.row_steps import cut_by_rows
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.sites.single_ops import single_op
from overlap_inductor.torch_compat import operators


@dataclass(frozen=True)
class Operands:
    """``program``, and the tensors that it reads besides the argument ``given`` of ``operands_of``. A tensor in
    ``rows`` has one row for each row of ``given``. A tensor in ``whole`` serves all rows."""

    program: RowProgram
    rows: list[fx.Node]
    whole: list[fx.Node]


@dataclass(frozen=True)
class _Call:
    """An op of the program. ``args``, ``kwargs``: its arguments. ``inputs``: the nodes among them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[fx.Node, ...]


def operands_of(
    given: list[fx.Node], steps: list[fx.Node], ends: fx.Node, result: fx.Node, handed_out: list[fx.Node]
) -> Operands:
    """``steps`` as a program, and the tensors that the program reads. The program first gets the rows of ``given``,
    then ``Operands.rows``.

    Args:
        steps: the nodes to compute, in graph order (``sites.row_steps``).
        ends: for each expert, the end of its rows.
        result: the step that the program returns.
        handed_out: nodes whose values the program returns, too.

    Raises:
        ValueError: an argument of a step cannot be written as text.
    """
    calls = _calls(given, steps, [result, *handed_out])
    own = {*given, *calls, ends}
    read = dict.fromkeys(n for call in calls.values() for n in call.inputs if tools.is_tensor(n) and n not in own)
    # If there are as many experts as rows, ``cut_by_rows`` takes the weights for rows. The weights belong to ``whole``.
    count, weights = tools.shape(result)[0], {n.args[1] for n in steps if is_grouped(n)}
    rows = [n for n in read if n not in weights and cut_by_rows(n, count)]
    whole = [n for n in read if n not in rows]
    numbers = {n: i for i, n in enumerate([*given, *rows, *calls])}

    def encoded(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in numbers:
                return {"row": numbers[value]}
            if value in whole:
                return {"whole": whole.index(value)}
            if value is ends:
                return {"ends": 0}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [encoded(v) for v in value]
        raise ValueError(f"an experts' op has the argument {value!r}; expected tensors, numbers and dtypes")

    ops = tuple(
        (call.name, [encoded(a) for a in call.args], {k: encoded(v) for k, v in call.kwargs.items()})
        for call in calls.values()
    )
    out = tuple(HandedOut(numbers[n], tuple(tools.shape(n)[1:]), dtype_name(tools.dtype(n))) for n in handed_out)
    program = RowProgram(ops, numbers[result], tools.shape(result)[1], dtype_name(tools.dtype(result)), out)
    return Operands(program, rows, whole)


def _calls(given: list[fx.Node], steps: list[fx.Node], results: list[fx.Node]) -> dict[fx.Node, _Call]:
    """``{node: the op that computes its value}`` in graph order: what the program needs to compute ``results``.

    If a single op has the same result as several nodes (``sites.single_ops``), the program calls this op. It replaces
    steps, and nodes before the steps that only the steps read::

        s = silu(gate)    # decomposed; no steps
        y = mul(r, s)     # a step                ->    the program: silu(gate), mul
    """
    members, rows = {*given, *steps}, tools.shape(results[0])[0]
    found: dict[fx.Node, _Call] = {}
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in given or node in found:
            continue
        single = single_op(node)
        if node not in members:
            by_rows = tools.is_tensor(node) and len(tools.shape(node)) == 2 and cut_by_rows(node, rows)
            if single is None or not by_rows or not members.issuperset(node.users):
                continue
        if single is not None:
            call = _Call(single.name, single.inputs, {}, single.inputs)
        else:
            name = operators.full_name(node) or GETITEM
            call = _Call(name, node.args, node.kwargs, tuple(node.all_input_nodes))
        found[node] = call
        pending += call.inputs
    return {node: found[node] for node in sorted(found)}

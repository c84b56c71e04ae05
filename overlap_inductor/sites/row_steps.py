# SPDX-License-Identifier: Apache-2.0
"""Recognise the ops that compute experts' rows, each row by itself.

They are grouped matmuls, gathers of rows (``index``), pointwise ops, and cuts and joins of columns. For example::

    rows = index(x, [tokens])                        # row i of rows is row tokens[i] of x
    gate, up = split(_grouped_mm(rows, w0, ends), inner, 1)
    y = _grouped_mm(silu(gate) * up, w1, ends)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
_OPERATORS = {("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")}
STEPS = 48
"""The most nodes that ``steps_before`` returns. Nodes before these count as inputs."""


def is_grouped(node: fx.Node) -> bool:
    """Whether ``node`` multiplies each group of a matrix's rows by the group's own matrix. False if it adds a bias."""
    if not is_grouped_operator(node):
        return False
    lhs, rhs, *_ = node.args
    if operators.argument(node, "offs") is None or operators.argument(node, "bias") is not None:
        return False
    return len(tools.shape(lhs)) == 2 and len(tools.shape(rhs)) == 3


def is_grouped_operator(node: fx.Node) -> bool:
    """Whether ``node`` is a grouped matmul. The groups may divide the rows, the columns or the contracted dim."""
    return operators.qualified_name(node) in _OPERATORS and tools.is_tensor(node)


def cut_by_rows(node: fx.Node, rows: Any) -> bool | None:
    """Whether dim 0 of ``node`` has an entry for each of ``rows`` rows. False if all rows read the same values.
    ``None`` if neither is known."""
    shape = tools.shape(node)
    if len(shape) < 2 or (isinstance(shape[0], int) and shape[0] == 1):
        return False
    return True if same_size(shape[0], rows) else None


def is_gather(node: fx.Node) -> bool:
    """Whether ``node`` takes rows of a matrix by a vector of row numbers: ``index(x, [rows])``."""
    if node.target is not aten.index.Tensor or len(tools.shape(node)) != 2:
        return False
    rows, *others = node.args[1]
    whole = tools.is_tensor(rows) and len(tools.shape(rows)) == 1 and not any(others)
    return whole and tools.dtype(rows) in (torch.int32, torch.int64)


def is_pointwise_on_rows(node: fx.Node, rows: Any) -> bool:
    """Whether ``node`` is a pointwise op that can be computed row by row on a matrix of ``rows`` rows."""
    if not tools.is_tensor(node) or len(tools.shape(node)) != 2 or not same_size(tools.shape(node)[0], rows):
        return False
    if not tools.is_pointwise(node) or tools.is_bitcast(node) or operators.is_mutable(node):
        return False
    if operators.has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    return _reads_tensors_only(node) and all(cut_by_rows(n, rows) is not None for n in tools.tensor_inputs(node))


def moves_columns(node: fx.Node) -> bool:
    """Whether ``node`` cuts or joins matrices by columns: a split, an element of a split, a slice or a ``cat``."""
    if _is_element(node):
        return isinstance(node.args[0], fx.Node) and node.args[0].target in tools.SPLITS and moves_columns(node.args[0])
    if node.target not in {*tools.SPLITS, aten.slice.Tensor, aten.cat.default} or not _reads_tensors_only(node):
        return False
    first = node.all_input_nodes[0]
    return len(tools.shape(first)) == 2 and operators.argument(node, "dim") in (1, -1)


def steps_before(last: list[fx.Node], ends: fx.Node, rows: Any) -> list[fx.Node]:
    """The steps that compute the inputs of ``last``, at most ``STEPS`` nodes in graph order. Only ``last`` and other
    steps read their results.

    Steps are the ops of the module's docstring, with these limits:

    - The nodes that a gather of rows reads are inputs.
    - A grouped matmul's ``offs`` must be ``ends``. So a row has the same expert in all grouped matmuls.
    - A node that computes a column ``[rows, 1]`` is an input, because the steps read it cheaply.

    Args:
        last: steps, among them a grouped matmul.
        ends: for each expert, the end of its rows.
        rows: the number of rows. If this is the int 1, the result is empty.
    """
    if isinstance(rows, int) and rows == 1:
        return []
    found = set(last)
    pending = {n for step in last for n in _sources(step, rows, ends) or () if n not in found}
    while pending and len(found) < STEPS + len(last):
        # The last pending node in the graph: its readers among the steps were visited before.
        node = max(pending)
        pending.remove(node)
        if not found.issuperset(node.users):
            continue
        if (sources := _sources(node, rows, ends)) is not None:
            found.add(node)
            pending.update(n for n in sources if n not in found)
    # If a split is no step, its parts are inputs.
    parts = {n for n in found if _is_element(n) and n.args[0] not in found}
    return sorted(found.difference(last, parts))


def _sources(node: fx.Node, rows: Any, ends: fx.Node) -> list[fx.Node] | None:
    """The nodes that may be steps before the step ``node``; ``None`` if ``node`` is no step."""
    if node.op != "call_function":
        return None
    if moves_columns(node):
        inputs = node.all_input_nodes
        return inputs if all(same_size(tools.shape(n)[0], rows) for n in inputs if tools.is_tensor(n)) else None
    if not tools.is_tensor(node) or not same_size(tools.shape(node)[0], rows) or tools.shape(node)[1:] in ([], [1]):
        return None
    if is_grouped(node):
        return [node.args[0]] if operators.argument(node, "offs") is ends else None
    if is_gather(node):
        return []
    if not is_pointwise_on_rows(node, rows):
        return None
    return [n for n in tools.tensor_inputs(node) if cut_by_rows(n, rows)]


def _is_element(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _reads_tensors_only(node: fx.Node) -> bool:
    """Whether ``node`` reads tensors only, and no size that the graph computes."""
    return all(map(tools.is_tensor, node.all_input_nodes))

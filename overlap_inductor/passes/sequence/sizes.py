# SPDX-License-Identifier: Apache-2.0
"""Write symbolic sizes into a graph as nodes.

The partitioner splits a joint graph by its edges, and a ``SymInt`` argument has no edge to the node that defines its
symbol. So nodes compute each size from an input of the graph::

    (s0 + 3) // 4   ->   floordiv(add(sym_size(x, 0), 3), 4)        behind the last input of the graph
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import sympy
import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.torch_compat.recompute import region_metadata
from overlap_inductor.torch_compat.size_functions import BINARY
from overlap_inductor.torch_compat.step_values import evaluated

aten = torch.ops.aten


class SizeNodes:
    """Writes each size of a graph once."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._known: dict[Any, fx.Node] = {}
        inputs = graph.find_nodes(op="placeholder")
        self._last = inputs[-1] if inputs else None
        for node in inputs:
            value = tools.value(node)
            if isinstance(value, torch.SymInt):
                self._known.setdefault(value.node.expr, node)
        self._meta = region_metadata(graph)
        self._tensors = [n for n in inputs if tools.is_tensor(n)]

    def argument(self, size: Any) -> Any:
        """``size`` as an argument of a node: an int, or a node.

        Raises:
            ValueError: no input of the graph defines a symbol of ``size``, or ``size`` has an operation other than
                sums, products, quotients and remainders.
        """
        return self._of(size.node.expr, size) if isinstance(size, torch.SymInt) else size

    def _of(self, expression: Any, size: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._known:
            self._known[expression] = self._written(expression, size)
        return self._known[expression]

    def _written(self, expression: Any, size: Any) -> fx.Node:
        if expression.is_Symbol:
            for tensor in self._tensors:
                for dim, own in enumerate(tools.shape(tensor)):
                    if isinstance(own, torch.SymInt) and own.node.expr == expression:
                        return self._node(aten.sym_size.int, tensor, dim)
            raise ValueError(f"no input of the graph defines the symbol {expression} of the size {size}")
        power = _whole_power(expression)
        parts = [self._of(a, size) for a in ([expression.base] * power if power else expression.args)]
        if power or isinstance(expression, (sympy.Add, sympy.Mul)):
            function = operator.add if isinstance(expression, sympy.Add) else operator.mul
        elif type(expression) in BINARY:
            function = BINARY[type(expression)]
        else:
            name = type(expression).__name__
            raise ValueError(
                f"the size {size} has the operation {name}; expected sums, products, quotients and remainders"
            )
        total = parts[0]
        for part in parts[1:]:
            total = self._node(function, total, part)
        return total

    def _node(self, target: Any, *args: Any) -> fx.Node:
        assert self._last is not None
        with self.graph.inserting_after(self._last):
            node = self.graph.call_function(target, args)
        node.meta = {**copy.deepcopy(self._meta), "val": evaluated(node)}
        self._last = node
        return node


def _whole_power(expression: Any) -> int:
    """``n`` if ``expression`` is ``base ** n`` for a positive int ``n``, else 0."""
    is_whole = isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0
    return int(expression.exp) if is_whole else 0

# SPDX-License-Identifier: Apache-2.0
"""Decide whether a tensor has the same values on every rank of a group.

An op on rows may read a tensor that is not held as rows. Each rank then reads its own copy of this tensor, or a part of
the copy. So the copies of all ranks must be equal. The main rules are:

- A result of the group's all-reduces and all-gathers is the same on all ranks.
- A matmul's result may differ, because its weight may be a shard.
- A value computed from a symbolic size may differ, unless the ranks exchange tensors of this size.
- An input of the graph may differ. If the tensor that the op reads depends on inputs of the graph, the ranks
  compare these inputs at the graph's first run (``runtime.same_inputs``).
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.distributed import group_description

_SAME_RESULT = {"all_reduce", "all_gather"}
"""Kinds of collectives whose result is the same on all ranks of the group."""
_NAMESPACES = ("aten", "prims", "_c10d_functional", "inductor_prims", "quantized_decomposed", "torchao")


class SameValues:
    """Finds the graph's inputs on which a tensor depends. ``symbols``: the symbols of sizes that all ranks of the
    group are known to share."""

    def __init__(self, group_name: str, symbols: Collection[Any] = ()) -> None:
        self.group_name = group_name
        self._symbols = frozenset(symbols)
        self._known: dict[fx.Node, frozenset[fx.Node] | None] = {}

    def inputs_of(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The graph's inputs on which ``node`` depends, other than through the group's collectives. ``None`` if
        ``node`` may differ between ranks although these inputs are the same."""
        stack = [node]
        while stack:
            current = stack[-1]
            if current in self._known:
                stack.pop()
                continue
            pending = [i for i in self._sources(current) if i not in self._known]
            if pending:
                stack.extend(pending)
            else:
                self._known[stack.pop()] = self._combined(current)
        return self._known[node]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [] if node.op != "call_function" or self._ends(node) else node.all_input_nodes

    def _ends(self, node: fx.Node) -> bool:
        """Whether the result of ``inputs_of(node)`` is known without a look at the inputs of ``node``."""
        return _is_number(node) or _may_differ(node) or self._of_group(node) is not None

    def _of_group(self, node: fx.Node) -> str | None:
        """The kind of ``node`` if it is a collective of the group, else ``None``."""
        same = collectives.group_of(node) == self.group_name
        return (collectives.kept_kind(node) or "").split(" ")[0] if same else None

    def _combined(self, node: fx.Node) -> frozenset[fx.Node] | None:
        if _is_number(node):
            return frozenset() if symbols_of(tools.value(node)) <= self._symbols else None
        if node.op == "placeholder":
            return frozenset([node])
        if node.op != "call_function" or _may_differ(node):
            return None
        kind = self._of_group(node)
        if kind is not None:
            return frozenset() if kind in _SAME_RESULT else None
        if not self._same_on_a_mesh(node):
            return None
        found = [self._known[i] for i in node.all_input_nodes]
        if any(f is None for f in found):
            return None
        return frozenset().union(*(f for f in found if f is not None))

    def _same_on_a_mesh(self, node: fx.Node) -> bool:
        """True if ``node`` is no collective. For a collective of another group: whether equal inputs give equal results
        on the ranks of this group. They do for an all-reduce or all-gather along another dim of a mesh. The ranks of
        this group are in different groups along that dim, but these groups combine the same inputs."""
        other = collectives.group_of(node)
        if other is None:
            return True
        return _kind_of(node) in _SAME_RESULT and None not in (
            group_description(other),
            group_description(self.group_name),
        )


def _kind_of(node: fx.Node) -> str:
    return (collectives.kept_kind(node) or "").split(" ")[0]


def _is_number(node: fx.Node) -> bool:
    return isinstance(tools.value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def symbols_of(number: Any) -> set[Any]:
    """The symbols of a symbolic number; empty for any other number."""
    symbolic = isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return set(number.node.expr.free_symbols) if symbolic else set()


def _may_differ(node: fx.Node) -> bool:
    """Whether ``node`` may differ between ranks although its inputs are the same. Random numbers, unknown ops and
    writes in place may. So may matmuls and convolutions, whose weights may be shards."""
    if getattr(node.target, "__name__", "") == "getitem" or operators.operator(node) is None:
        return False
    return (
        operators.qualified_name(node)[0] not in _NAMESPACES
        or operators.has_tag(node, torch.Tag.nondeterministic_seeded)
        or operators.is_mutable(node)
        or matmuls.parse(node) is not None
        or operators.qualified_name(node)[1].rstrip("_").endswith(("mm", "matmul", "convolution", "rand", "random"))
    )


def inputs_to_compare(found: Mapping[fx.Node, frozenset[fx.Node]]) -> list[fx.Node]:
    """All tensors among the inputs in ``found``, in graph order."""
    return sorted({i for inputs in found.values() for i in inputs if tools.is_tensor(i)})

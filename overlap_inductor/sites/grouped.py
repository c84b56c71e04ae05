# SPDX-License-Identifier: Apache-2.0
"""``GroupedMatmul``: a grouped matmul, the row-wise ops around it and the index after it, taken as one matmul.

A mixture of experts sorts its ``(token, expert)`` pairs by expert, and an index later restores their order. The
search for a site's matmuls (``passes.find_region``) takes all these nodes as one matmul with the result ``out``::

    x    = row_steps(...)                                                # the experts' first matmul, an activation
    y    = _grouped_mm(x, w, ends)                                       # rows in the experts' order
    rows = pointwise(y, ...)                                             # for example a mask
    out  = reshape(index(rows, [places]), [tokens, experts_a_token, N])  # row i of out is row places[i] of rows

A part of ``out`` needs only the rows of ``x`` at its places. If a part's places are sorted, its rows of ``x`` are in
the experts' order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from overlap_inductor.facts import site as facts
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.row_steps import cut_by_rows
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.sites.row_steps import steps_before
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
KIND = "grouped_mm"
STEPS = 16
"""If the search from an index back to its grouped matmul visits more nodes than this, it finds nothing."""


@dataclass(frozen=True)
class GroupedNode(MatmulNode):
    """A grouped matmul alone. Its rows are in the order of their experts."""

    @property
    def grouped(self) -> fx.Node:
        return self.node

    @property
    def lhs(self) -> fx.Node:
        return self.grouped.args[0]

    @property
    def rhs(self) -> fx.Node:
        return self.grouped.args[1]

    @property
    def ends(self) -> fx.Node:
        """For each expert, the index of the row after its last row."""
        return operators.argument(self.grouped, "offs")

    @property
    def bias(self) -> None:
        return None

    def describe(self, role: str | None) -> facts.Matmul:
        m, k = map(tools.size_text, tools.shape(self.lhs))
        experts, _, n = map(tools.size_text, tools.shape(self.rhs))
        return facts.Matmul(KIND, m, n, k, str(tools.dtype(self.lhs)).removeprefix("torch."), experts, role)

    def refusal(self) -> str | None:
        return None


@dataclass(frozen=True)
class GroupedMatmul(GroupedNode):
    """See the module. ``node`` is the index, or the view of it that splits its rows. All other nodes are read from the
    graph each time."""

    @property
    def index(self) -> fx.Node:
        return _behind_views(self.node)

    @property
    def places(self) -> fx.Node:
        """For each row of the result, its place in the experts' order."""
        return self.index.args[1][0]

    @property
    def counts_from_zero(self) -> bool:
        """Whether all places are known to be 0 or more. Negative places count from the end."""
        places = self.places
        if places.target is aten.index_put.default:
            order, values, base = places.args[1], places.args[2], places.args[0]
            covers = len(order) == 1 and _is_order(order[0]) and same_size(tools.shape(base)[0], tools.shape(values)[0])
            counts = values.target is torch.ops.prims.iota.default and values.kwargs.get("start") == 0
            rises = counts and values.kwargs.get("step", 0) > 0
            return covers and rises and not operators.argument(places, "accumulate", False)
        return _is_order(places)

    @property
    def inner(self) -> list[fx.Node]:
        """``steps``, the index and its views, without ``node``."""
        views, node = [], self.node
        while node is not self.index:
            node = node.args[0]
            views.append(node)
        return [*self.steps, *views]

    @property
    def steps(self) -> list[fx.Node]:
        """The grouped matmul, the pointwise ops after it and the steps before it (``row_steps.steps_before``), in graph
        order."""
        return sorted([*self._before, *self._after])

    @property
    def earlier(self) -> list[GroupedNode]:
        """The grouped matmuls that compute the left operand of this one."""
        return [GroupedNode(n, KIND) for n in self._before if is_grouped(n)]

    @property
    def grouped(self) -> fx.Node:
        return next(n for n in self._after if is_grouped(n))

    @property
    def is_masked(self) -> bool:
        """Whether a ``where`` follows the grouped matmul. A ``where`` is assumed to mask rows of other ranks'
        experts."""
        return any(n.target is aten.where.self for n in self._after)

    @property
    def _before(self) -> list[fx.Node]:
        return steps_before(self._after, self.ends, tools.shape(self.index.args[0])[0])

    @property
    def _after(self) -> list[fx.Node]:
        """The grouped matmul and the pointwise ops after it."""
        found = _computed_rows(self.index.args[0])
        assert found is not None, "the nodes of a grouped matmul were checked when it was found"
        return found

    def output_role(self, dim: int) -> str:
        return "N" if dim == len(tools.shape(self.node)) - 1 else "M"


def parse(node: fx.Node) -> GroupedMatmul | None:
    if not tools.is_tensor(node) or len(tools.shape(node)) < 2:
        return None
    index = _behind_views(node)
    if index.target is not aten.index.Tensor or not same_size(tools.shape(index)[-1], tools.shape(node)[-1]):
        return None
    places, *others = index.args[1]
    if not tools.is_tensor(places) or tools.dtype(places) not in (torch.int32, torch.int64) or any(others):
        return None
    if len(tools.shape(places)) != 1 or _computed_rows(index.args[0]) is None:
        return None
    return GroupedMatmul(node, KIND)


def _is_order(node: fx.Node) -> bool:
    """Whether ``node`` is the order that a sort of a vector returns: each index once."""
    if getattr(node.target, "__name__", "") != "getitem" or len(tools.shape(node)) != 1:
        return False
    return operators.qualified_name(node.args[0]) == ("aten", "sort") and node.args[1] == 1


def _behind_views(node: fx.Node) -> fx.Node:
    while tools.is_reshape(node):
        node = node.args[0]
    return node


def _computed_rows(top: fx.Node) -> list[fx.Node] | None:
    """One grouped matmul and the pointwise ops that compute ``top`` from its result, in graph order.

    ``None`` if ``top`` is not a matrix, or if there is not exactly one grouped matmul within ``STEPS`` nodes. Also
    ``None`` if a pointwise op reads a tensor that has neither an entry for each row nor the same values for all rows
    (``cut_by_rows``).
    """
    found: dict[fx.Node, bool] = {}
    shape = tools.shape(top)
    if len(shape) != 2 or not _reaches(top, found) or len(found) > STEPS:
        return None
    inner = sorted(n for n, reaches in found.items() if reaches)
    if sum(map(is_grouped, inner)) != 1:
        return None
    read = [n for node in inner if not is_grouped(node) for n in tools.tensor_inputs(node) if n not in inner]
    return inner if all(cut_by_rows(n, shape[0]) is not None for n in read) else None


def _reaches(top: fx.Node, found: dict[fx.Node, bool]) -> bool:
    """Whether ``top`` is a grouped matmul or is computed from one by pointwise ops that keep its rows. ``found`` gets
    the answer for each visited node, about ``2 * STEPS`` at most."""
    stack = [top]
    while stack:
        node = stack[-1]
        if node in found:
            stack.pop()
            continue
        passes = tools.is_pointwise(node) and tools.same_shape(node, top) and len(found) + len(stack) <= 2 * STEPS
        sources = [n for n in tools.tensor_inputs(node) if tools.same_shape(n, top)] if passes else []
        if is_grouped(node):
            found[stack.pop()] = True
        elif pending := [n for n in sources if n not in found]:
            stack += pending
        else:
            found[stack.pop()] = any(found[n] for n in sources)
    return found[top]

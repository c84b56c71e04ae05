# SPDX-License-Identifier: Apache-2.0
"""``LookupNode`` presents a lookup in an embedding table, or the gradient of a table, as a matmul.

The left operand, the selection, says which rows of the right operand are added, and with which weights. Most elements
of the selection are zero::

                                out[M, N]          lhs[M, K]               rhs[K, N]
    embedding, embedding_bag    out[bags, width] = selection[bags, rows] @ table[rows, width]
    embedding_gradient          out[rows, width] = selection^T[rows, bags] @ gradient[bags, width]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from overlap_inductor.facts import site as facts
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.torch_compat import operators

aten = tools.aten
_TABLE, _GRADIENT = ("weight", "indices"), ("grad", "indices")
_LOOKUPS: dict[Any, tuple[str, str, str]] = {
    aten.embedding.default: ("embedding", *_TABLE),
    aten._embedding_bag.default: ("embedding_bag", *_TABLE),
    aten._embedding_bag_forward_only.default: ("embedding_bag", *_TABLE),
}
_GRADIENTS: dict[Any, tuple[str, str, str]] = {
    aten._embedding_bag_backward.default: ("embedding_gradient", *_GRADIENT),
    aten._embedding_bag_dense_backward.default: ("embedding_gradient", *_GRADIENT),
    aten._embedding_bag_per_sample_weights_backward.default: ("embedding_gradient", *_GRADIENT),
    aten.embedding_dense_backward.default: ("embedding_gradient", "grad_output", "indices"),
    aten.index_put.default: ("embedding_gradient", "values", "indices"),
    aten._unsafe_index_put.default: ("embedding_gradient", "values", "indices"),
    aten._unsafe_masked_index_put_accumulate.default: ("embedding_gradient", "values", "indices"),
}


@dataclass(frozen=True)
class LookupNode(MatmulNode):
    """A lookup or a gradient of a table. ``dense``: the name of the argument that holds the table or the gradient.
    ``selected``: the name of the argument that holds the indices."""

    dense: str
    selected: str

    @property
    def lhs(self) -> fx.Node:
        found: Any = operators.argument(self.node, self.selected)
        return found if isinstance(found, fx.Node) else next(n for n in found if n is not None)

    @property
    def rhs(self) -> fx.Node:
        found: fx.Node = operators.argument(self.node, self.dense)
        return found

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        return (self.rhs,)

    @property
    def bags(self) -> Size:
        """For a lookup, the number of rows of its result. For a table's gradient, the number of rows of ``rhs``."""
        made = tools.value(self.node)
        rows = tools.value(self.rhs) if self.kind == "embedding_gradient" else made[0] if self.is_tuple else made
        return tools.numel(list(rows.shape)[:-1])

    @property
    def is_tuple(self) -> bool:
        """Whether the node's value is a tuple, of which element 0 is the result."""
        return isinstance(tools.value(self.node), (tuple, list))

    @property
    def table_rows(self) -> Size:
        return tools.shape(self.node if self.kind == "embedding_gradient" else self.rhs)[0]

    def describe(self, role: str | None) -> facts.Matmul:
        text = tools.size_text
        name = str(tools.dtype(self.rhs)).removeprefix("torch.")
        rows, inner = self.bags, self.table_rows
        if self.kind == "embedding_gradient":
            rows, inner = inner, rows
        return facts.Matmul(self.kind, text(rows), text(tools.shape(self.rhs)[-1]), text(inner), name, 1, role)


def parse(node: fx.Node) -> LookupNode | None:
    found = _LOOKUPS.get(node.target)
    return None if found is None else LookupNode(node, *found)


def parse_gradient(node: fx.Node) -> LookupNode | None:
    """``node`` as a ``LookupNode``, if it computes the gradient of a table or of per-sample weights. Else ``None``."""
    found = _GRADIENTS.get(node.target)
    if found is None or not tools.is_tensor(node):
        return None
    gradient = LookupNode(node, *found)
    if operators.argument(node, "accumulate", True) is False:
        return None  # The op overwrites rows, so it does not add up gradients.
    selected: Any = operators.argument(node, gradient.selected)
    if isinstance(selected, (list, tuple)) and [n is None for n in selected] != [False]:
        return None
    return gradient


def behind_reshapes(node: fx.Node) -> fx.Node:
    """The tensor from which ``node`` is made by reshapes alone, or ``node`` itself."""
    while tools.is_reshape(node):
        node = node.args[0]
    return node

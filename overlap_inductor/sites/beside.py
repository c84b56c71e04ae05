# SPDX-License-Identifier: Apache-2.0
"""Give the reason why a collective leads to no site, if the finders gave none.

The search for a matmul follows paths of at most ``STEPS`` nodes. For a gather or an all-to-all, it covers the nodes
after the collective. If it finds no matmul there, it then covers the nodes before the collective. For any other
collective, it first covers the nodes before the collective, then the nodes after it. Of the matmuls found, the reason
names a grouped one, else the nearest one. It also names the first of these obstacles:

1. The matmul's kind cannot be cut: grouped, a product with a vector, or unknown to ``matmuls.parse``. If the collective
   moves counts of rows, the grouped matmul does not multiply what is moved, and the reason is ``no_matmul``.
2. An op between matmul and collective is not pointwise and does more than move elements.
3. A slice or ``cat`` is between them.
4. No cut of the matmul matches the collective's shards.

If a collective is neither a gather nor an all-to-all, and its matmul is after the collective, the reason names no
obstacle.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators

aten = tools.aten
NO_MATMUL = "no matmul is next to the collective, so there is nothing to hide it behind"
STEPS = 12
"""The most nodes on a path of ``_nearest``: from the collective's input or wait to the matmul, with both ends. The ops
that combine the results of experts are six to nine of these nodes."""
_COUNTS = (torch.int32, torch.int64)
"""Dtypes of the numbers of rows that the ranks of a mixture of experts exchange. No grouped matmul multiplies them."""
_VECTORS = ("mv", "addmv", "dot", "vdot")
_Way = tuple[fx.Node, fx.Node | None, fx.Node | None]


def reason(collective: CollectiveNode) -> Reason:
    reader = _nearest(collective.wait, forward=True)
    behind = reader if collective.kind in ("all_gather", "all_to_all") else None
    found = behind or _nearest(collective.input, forward=False)
    if found is not None:
        return _told(found, collective, f"the {collective.kind.replace('_', '-')} and " if behind else "")
    if reader is not None:
        name = reader[0].name
        return Reason(
            "no_matmul",
            f"{name} reads the collective's result, but only a matmul that computes the collective's input could hide"
            " the collective, and no matmul computes this input",
        )
    return Reason("no_matmul", NO_MATMUL)


def _told(found: _Way, collective: CollectiveNode, gather: str) -> Reason:
    node, computed, moved = found
    kind = _other_matmul(node)
    dtype = tools.dtype(collective.input)
    if kind == "grouped" and dtype in _COUNTS:
        return Reason(
            "no_matmul",
            f"the collective moves {dtype} numbers, such as the counts of rows that {node.name} ({node.target}) depends"
            " on; no matmul multiplies them",
        )
    if kind == "grouped":
        return Reason(
            "grouped_matmul",
            f"the matmul next to the collective is {node.name} ({node.target}), which multiplies groups of rows. It can"
            " be cut before an all-reduce or a reduce-scatter, if an index (aten.index) of its rows follows and only"
            " pointwise ops stand between matmul and index. It can also be cut between two all-to-alls that bring and"
            " return its rows",
        )
    if kind == "vector":
        return Reason(
            "matmul_form",
            f"the matmul next to the collective is {node.name} ({node.target}), a product with a vector; only matmuls"
            " of matrices can be cut",
        )
    if kind is not None:
        return Reason(
            "matmul_form",
            f"the matmul next to the collective is {node.name} ({node.target}), a kind that this version cannot cut",
        )
    between = computed or moved
    place = f"between {gather}{node.name}" if gather else f"between {node.name} and the collective"
    if between is None:
        return Reason(
            "layout",
            f"the matmul {node.name} is next to the collective, but no cut of it matches the collective's shards",
        )
    return Reason(
        "op_between", f"{between.name} ({between.target}) is {place} and cannot be computed in pieces{_why(between)}"
    )


def _why(node: fx.Node) -> str:
    if node.target is aten.slice.Tensor:
        dim, size = operators.argument(node, "dim"), tools.shape(node)
        start = operators.argument(node, "start") or 0
        return f": it takes {size[dim]} of {tools.shape(node.args[0])[dim]} indices of dim {dim}, from {start} on"
    if node.target is aten.cat.default:
        return f": it joins {len(node.args[0])} tensors on dim {operators.argument(node, 'dim')}"
    return ""


def _other_matmul(node: fx.Node) -> str | None:
    """``grouped``, ``vector`` or ``other`` if ``node`` is a matmul that ``matmuls.parse`` does not know, else
    ``None``."""
    _, name = operators.qualified_name(node)
    if "grouped_mm" in str(node.target):
        return "grouped"
    if name in _VECTORS or _is_product_with_vector(node):
        return "vector"
    return (
        "other"
        if name.rstrip("_").endswith(("mm", "mm_v2", "matmul", "convolution")) and matmuls.parse(node) is None
        else None
    )


def _is_product_with_vector(node: fx.Node) -> bool:
    """Whether ``node`` is ``sum(x * v, last dim)``, as Inductor writes ``x @ v`` and ``x[0].dot(v)`` for a vector
    ``v``."""
    if node.target not in (aten.sum.dim_IntList, aten.sum.default):
        return False
    product: fx.Node = node.args[0]
    while tools.is_cast(product):
        product = product.args[0]
    terms = list(tools.tensor_inputs(product)) if product.target is aten.mul.Tensor else []
    rank = len(tools.shape(product)) if terms else 0
    dims = operators.argument(node, "dim") or list(range(rank))
    if len(terms) != 2 or [d % rank for d in dims] != [rank - 1]:
        return False
    vector = min(terms, key=lambda n: len(tools.shape(n)))
    return (
        len(tools.shape(vector)) == 1
        and same_size(tools.shape(vector)[0], tools.shape(product)[-1])
        and all(len(tools.shape(t)) in (1, rank) for t in terms)
    )


def _nearest(start: fx.Node, forward: bool) -> _Way | None:
    """``(matmul, computed, moved)`` for a path of at most ``STEPS`` nodes from ``start`` to the nearest matmul, or
    ``None``.

    - ``computed``: the first op on the path that is not pointwise and does more than move elements, or ``None``.
    - ``moved``: the first slice or ``cat`` on the path, or ``None``.

    A grouped matmul is preferred to nearer ones. Of the visited paths to the matmul, one with ``computed`` is
    preferred. If none has ``computed``, one with ``moved`` is preferred.
    """
    frontier: list[_Way] = [(start, None, None)]
    seen, found = {(start, True)}, []
    for _ in range(STEPS):
        reached: list[_Way] = []
        for node, computed, moved in frontier:
            if node is not start or not forward:
                if operators.is_functional_collective(node):
                    continue
                if matmuls.parse(node) is not None or _other_matmul(node) is not None:
                    found.append((node, computed, moved))
                    continue
                computed, moved = (
                    computed or (None if _moves(node) else node),
                    moved or (node if _takes(node) else None),
                )
            following = node.users if forward else node.all_input_nodes
            for other in following:
                if other.op == "call_function" and (other, computed is None) not in seen:
                    seen.add((other, computed is None))
                    reached.append((other, computed, moved))
        frontier = reached
    if not found:
        return None
    nearest = next((way[0] for way in found if _other_matmul(way[0]) == "grouped"), found[0][0])
    return min((way for way in found if way[0] is nearest), key=lambda way: (way[1] is None, way[2] is None))


def _takes(node: fx.Node) -> bool:
    return node.target in (aten.slice.Tensor, aten.cat.default)


def _moves(node: fx.Node) -> bool:
    """Whether ``node`` is pointwise or only moves elements (a view, permute, split, slice or ``cat``)."""
    views = tools.is_reshape(node) or tools.permutation(node) is not None or node.target in tools.SPLITS
    return views or tools.is_pointwise(node) or _takes(node) or getattr(node.target, "__name__", "") == "getitem"

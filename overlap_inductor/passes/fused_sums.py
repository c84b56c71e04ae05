# SPDX-License-Identifier: Apache-2.0
"""Take apart sums of matmuls that Inductor has fused into one node, so that sites can be found in them.

The graph before and after::

    take_apart   mm_plus_mm(a, b, c, d)                     -> add(mm(a, b), mm(c, d))
    unfold       addmm(bias, a, b), bias from matmuls       -> add(mm(a, b), bias)
    put_back     the reverse of both, unless a site's rewrite has replaced a part

Each ``add`` written here has its own name as a mark in ``meta``. A copy of the ``add`` has another name than its mark,
so the copy is not fused again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from overlap_inductor.sites import matmuls
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.step_values import computed

aten = torch.ops.aten
MARK = "overlap_inductor_fused_sum"


def take_apart(graph: fx.Graph) -> None:
    """Write each ``mm_plus_mm`` as two ``mm`` and an ``add``. If this raises, the caller must call
    ``put_back`` to restore the graph."""
    for node in list(graph.nodes):
        operands = operators.summed_matmuls(node)
        if operands is None:
            continue
        values = [computed(aten.mm.default, *(n.meta["val"] for n in pair)) for pair in (operands[:2], operands[2:])]
        values.append(computed(aten.add.Tensor, *values))
        with graph.inserting_before(node):
            products = [graph.call_function(aten.mm.default, pair) for pair in (operands[:2], operands[2:])]
            total = graph.call_function(aten.add.Tensor, tuple(products))
        for made, value in zip((*products, total), values, strict=True):
            made.meta = {**node.meta, "val": value}
        total.meta[MARK] = (total.name, node.name, node.target, tuple(node.kwargs))
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def unfold(nodes: Iterable[fx.Node]) -> bool:
    """If the bias of an ``addmm`` in ``nodes`` is a matmul or a sum of matmuls (``matmuls.folded``), replace the
    ``addmm`` by ``mm`` and ``add``. An ``addmm`` with ``alpha`` or ``beta`` stays. Returns whether any was replaced."""
    found = sorted(
        n for n in nodes if (matmul := matmuls.parse(n)) is not None and matmuls.folded(matmul) and not n.kwargs
    )
    for node in found:
        bias, *operands = node.args
        product_value = computed(aten.mm.default, *(n.meta["val"] for n in operands))
        with node.graph.inserting_before(node):
            product = node.graph.call_function(aten.mm.default, tuple(operands))
            total = node.graph.call_function(aten.add.Tensor, (product, bias))
        product.meta = {**node.meta, "val": product_value}
        total.meta = {**node.meta, MARK: (total.name, node.name, node.target, ())}
        node.replace_all_uses_with(total)
        node.graph.erase_node(node)
    return bool(found)


def put_back(graph: fx.Graph, unfolded_only: bool = False) -> None:
    """Fuse again each sum whose products are still ``mm`` nodes that only the sum reads. ``unfolded_only``: only the
    sums that ``unfold`` wrote."""
    for node in list(graph.nodes):
        name, before, target, names = node.meta.get(MARK, (None, None, None, ()))
        products = node.args if names else node.args[:1]
        if (
            name != node.name
            or (names and unfolded_only)
            or any(n.target is not aten.mm.default or set(n.users) != {node} for n in products)
        ):
            continue
        operands = [a for product in products for a in product.args]
        with graph.inserting_before(node):
            if names:
                whole = graph.call_function(target, (), dict(zip(names, operands, strict=True)))
            else:
                whole = graph.call_function(target, (node.args[1], *operands))
        whole.meta = {key: value for key, value in node.meta.items() if key != MARK}
        node.replace_all_uses_with(whole)
        for old in (node, *dict.fromkeys(products)):
            graph.erase_node(old)
        whole.name = before

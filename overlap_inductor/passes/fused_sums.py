# SPDX-License-Identifier: Apache-2.0
"""Take apart sums of matmuls that Inductor has fused into one node, so that sites can be found in them; put back those
that no site took.

The graph before and after::

    take_apart   mm_plus_mm(a, b, c, d)                     -> add(mm(a, b), mm(c, d))
    unfold       addmm(bias, a, b), bias a sum of matmuls   -> add(mm(a, b), bias)
    put_back     the reverse of both, unless a site's rewrite has replaced a part

Inductor writes ``mm_plus_mm`` where it autotunes. A taken-apart ``add`` is known by a mark in its ``meta`` that holds
its name. So a copy that a rewrite makes, which has another name, does not count. A node that a failed rewrite restored
has its name again and counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import matmuls
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.guards import without_guards

aten = torch.ops.aten
MARK = "overlap_inductor_fused_sum"


def take_apart(graph: fx.Graph) -> None:
    """Write each ``mm_plus_mm`` as two ``mm`` and an ``add``. If this raises, ``put_back`` restores the graph."""
    for node in list(graph.nodes):
        operands = operators.summed_matmuls(node)
        if operands is None:
            continue
        values = [_computed(aten.mm.default, *(n.meta["val"] for n in pair)) for pair in (operands[:2], operands[2:])]
        values.append(_computed(aten.add.Tensor, *values))
        with graph.inserting_before(node):
            products = [graph.call_function(aten.mm.default, pair) for pair in (operands[:2], operands[2:])]
            total = graph.call_function(aten.add.Tensor, tuple(products))
        for made, value in zip((*products, total), values, strict=True):
            made.meta = {**node.meta, "val": value}
        total.meta[MARK] = (total.name, node.name, node.target, tuple(node.kwargs))
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def unfold(nodes: Iterable[fx.Node]) -> bool:
    """Write each of ``nodes`` whose bias is a sum of matmuls as a matmul without bias, and add the bias to it. Returns
    whether there was any."""
    found = sorted(
        n for n in nodes if (matmul := matmuls.parse(n)) is not None and matmuls.folded(matmul) and not n.kwargs
    )
    for node in found:
        bias, *operands = node.args
        product_value = _computed(aten.mm.default, *(n.meta["val"] for n in operands))
        with node.graph.inserting_before(node):
            product = node.graph.call_function(aten.mm.default, tuple(operands))
            total = node.graph.call_function(aten.add.Tensor, (product, bias))
        product.meta = {**node.meta, "val": product_value}
        total.meta = {**node.meta, MARK: (total.name, node.name, node.target, ())}
        node.replace_all_uses_with(total)
        node.graph.erase_node(node)
    return bool(found)


def put_back(graph: fx.Graph, unfolded_only: bool = False) -> None:
    """Fuse each taken-apart sum again if its products are still there and only the sum reads them. ``unfolded_only``:
    only those that ``unfold`` wrote."""
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


def _computed(operator: Any, *values: Any) -> Any:
    mode = operators.fake_mode(values)
    with mode, without_guards(mode.shape_env):
        return operator(*values)

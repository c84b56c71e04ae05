# SPDX-License-Identifier: Apache-2.0
"""Keeps Inductor from padding a matmul next to a collective while overlap is on.

Inductor pads a matmul to aligned sizes if this was faster in a measurement on this rank::

    y = mm(x, w [k, 1023])   ->   y = slice(mm(x, constant_pad_nd(w) [k, 1024]))

If ranks decided differently, they could find different sites, and would then run without overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable

import torch
from torch import fx

from overlap_inductor.torch_compat import operators

_LIMIT = 1000
"""If the search from a matmul to a collective (``_reaches``) visits more nodes than this, the matmul counts as next to
a collective."""
_COPIES = {"clone", "lift_fresh_copy", "cat", "constant_pad_nd", "_unsafe_view", "convert_element_type", "_to_copy"}
_ROW_WISE = {"sum", "mean", "amax", "amin", "prod", "var", "var_mean", "_softmax", "_log_softmax", "cumsum"}
"""Row-wise ops (``sites.row_wise``) and sums over experts. They may be between a matmul and a collective of a site,
like views, copies and pointwise ops."""
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm"}


def beside_collective(matmul: fx.Node) -> bool:
    """Whether ``matmul`` could be part of a site. It could be if only views, copies, row-wise and pointwise ops, and
    waits, are on one of these paths:

    - from ``matmul`` to a collective;
    - from an all-gather or all-to-all to ``matmul``;
    - from an all-gather or all-to-all to another matmul, and on to ``matmul``. (Padding ``matmul`` would change where
      the other matmul's epilogue ends.)
    """
    known: dict[fx.Node, bool] = {}

    def follows(node: fx.Node, through_another: bool) -> bool:
        def is_gather(other: fx.Node, namespace: str, name: str) -> bool:
            if namespace in operators.FUNCTIONAL_COLLECTIVES:
                return name.startswith(("all_gather", "all_to_all"))
            if through_another and namespace == "aten" and name in _MATMULS:
                known[other] = known[other] if other in known else follows(other, False)
                return known[other]
            return False

        return _reaches(node, is_gather, forward=False)

    return _reaches(
        matmul,
        lambda _, namespace, name: namespace in operators.FUNCTIONAL_COLLECTIVES and name != "wait_tensor",
        forward=True,
    ) or follows(matmul, True)


def _reaches(matmul: fx.Node, wanted: Callable[[fx.Node, str, str], bool], forward: bool) -> bool:
    def next_to(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if forward else node.all_input_nodes

    pending = list(next_to(matmul))
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        namespace, name = operators.qualified_name(node)
        if wanted(node, namespace, name) or len(seen) > _LIMIT:
            return True
        if _moves(node, name) or (not forward and name == "wait_tensor"):
            pending += next_to(node)
    return False


def _moves(node: fx.Node, name: str) -> bool:
    op = operators.operator(node)
    if op is None:
        # ``getitem`` is not an op of torch. It takes an element of a split.
        return getattr(node.target, "__name__", "") == "getitem"
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    return views or name in _COPIES | _ROW_WISE or operators.has_tag(node, torch.Tag.pointwise)

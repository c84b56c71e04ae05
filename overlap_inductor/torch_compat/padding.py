"""Inductor pads a matmul to aligned sizes where a timing on the rank at hand says that it pays. Ranks that decide differently would find
different sites, and wait for one another: a matmul beside a collective is not padded while overlap is on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from overlap_inductor.torch_compat import operators

_LIMIT = 1000
"""Nodes looked at from one matmul. The answer need only be the same on all ranks."""
_COPIES = {"clone", "cat", "constant_pad_nd", "_unsafe_view", "convert_element_type", "_to_copy", "full", "getitem"}


def beside_collective(matmul: fx.Node) -> bool:
    """Whether an all-gather or all-to-all leads to ``matmul``, or it to any collective, through nothing but views, copies and pointwise ops."""
    return _reaches(matmul, forward=True) or _reaches(matmul, forward=False)


def _reaches(matmul: fx.Node, forward: bool) -> bool:
    def next_to(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if forward else node.all_input_nodes

    pending = list(next_to(matmul))
    seen: set[fx.Node] = set()
    while pending and len(seen) < _LIMIT:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        namespace, name = operators.qualified_name(node)
        if namespace == "_c10d_functional":
            if forward and name != "wait_tensor":
                return True
            if not forward and name == "wait_tensor":
                pending += node.all_input_nodes
            if not forward and name.startswith(("all_gather", "all_to_all")):
                return True
        elif _moves(node, name):
            pending += next_to(node)
    return False


def _moves(node: fx.Node, name: str) -> bool:
    op = operators.operator(node)
    if op is None:
        return getattr(node.target, "__name__", "") in _COPIES
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    return views or name in _COPIES or operators.has_tag(node, torch.Tag.pointwise)

# SPDX-License-Identifier: Apache-2.0
"""Count the FLOPs of a node, and the bytes that it reads, from the sizes of its operands.

PyTorch's formulas (``torch.utils.flop_counter``) count convolutions, flex attention and ops that the user registered.
Matmuls and attention are counted here, because PyTorch's formulas have gaps:

- They raise for ``bmm(..., out_dtype=)`` and ``addmm(..., out_dtype=)`` (torch 2.13).
- They raise for attention with fewer heads of keys than of queries (torch 2.11).
- For ``_flash_attention_forward``, they read the dim of the tokens as the dim of the heads.
- There is no formula for ``_int_mm``.

This module rounds sizes as in ``sites.sizes``. A symbolic size counts as the number that ``sizes.hint`` returns.
PyTorch's formulas get exact sizes.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import rounded
from overlap_inductor.torch_compat import operators

log = logging.getLogger("overlap_inductor")

_MATMULS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), "mat2"),
    "baddbmm": "batch2",
}
"""For each matmul's name, the name of its right operand, whose second last dim is K."""
_ATTENTION = re.compile(r"_(scaled_dot_product_)?(flash|efficient|cudnn)_attention(_forward|_backward)?")


def is_counted(node: fx.Node) -> bool:
    """Whether ``node`` is a matmul, an attention, or another op for which PyTorch or the user has a formula."""
    namespace, name = operators.qualified_name(node)
    return (namespace == "aten" and (name in _MATMULS or bool(_ATTENTION.fullmatch(name)))) or bool(_formula(node))


def flops(node: fx.Node) -> float | None:
    """The FLOPs of a node that ``is_counted``; causal attention counts as full attention.

    ``None`` if a size of a matmul or of an attention depends on data, or if a node has no example tensor
    (``node.meta["val"]``). Also ``None`` if PyTorch's or the user's formula raises. The error is logged.
    """
    namespace, name = operators.qualified_name(node)
    if namespace == "aten" and name in _MATMULS:
        right = _sizes(operators.argument(node, _MATMULS[name]))
        elements = _elements(node)
        return 2.0 * elements * right[-2] if right and elements is not None else None
    if namespace == "aten" and _ATTENTION.fullmatch(name):
        return _of_attention(node, name)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tools.value(n))
    try:
        return float(_formula(node)(*args, **kwargs, out_val=tools.value(node)))
    # The formula may belong to the user, and the model must compile whatever the formula does.
    except Exception as error:  # noqa: BLE001
        log.info("overlap_inductor: the FLOPs of %s (%s) cannot be counted: %s", node.name, node.target, error)
        return None


def bytes_read(node: fx.Node) -> float:
    """Bytes of the tensors that ``node`` reads. Tensors of unknown size count as empty."""
    inputs = [n for n in node.all_input_nodes if tools.is_tensor(n)]
    return float(sum((_elements(n) or 0) * tools.dtype(n).itemsize for n in inputs))


def _of_attention(node: fx.Node, name: str) -> float | None:
    """The FLOPs of an attention op, or ``None`` if a size is not known. The forward op has two products of queries x
    keys x a head's size. The backward op has five: three with the size of a query, and two with the size of a value."""
    query, key, value = (_sizes(operators.argument(node, operand)) for operand in ("query", "key", "value"))
    if not query or not key or not value:
        return None
    if name.startswith("_scaled_dot_product"):
        keys = key[-2]
    else:
        # Keys are ``[batch, tokens, heads, size]``, or ``[tokens of all sequences, heads, size]``. In the second case,
        # an argument holds the length of the longest sequence.
        longest = operators.argument(node, "max_k", operators.argument(node, "max_seqlen_k"))
        keys = longest if isinstance(longest, int) else key[-3]
    of_scores, of_values = (3, 2) if name.endswith("_backward") else (1, 1)
    queries = _elements(operators.argument(node, "query")) or 0
    return 2.0 * queries * keys * (of_scores + of_values * value[-1] / max(query[-1], 1))


def _formula(node: fx.Node) -> Any:
    op = operators.operator(node)
    return flop_registry.get(op.overloadpacket if op is not None else node.target)


def _sizes(node: Any) -> list[int] | None:
    """The rounded sizes of a tensor; ``None`` if a size depends on data or the node has no example tensor."""
    if not tools.is_tensor(node) or tools.has_unbacked(tools.shape(node)):
        return None
    return [rounded(hint(s)) for s in tools.shape(node)]


def _elements(node: Any) -> int | None:
    """The product of ``_sizes``. Symbolic sizes are multiplied first, because the number of tokens, which ``hint``
    scales, may be the product of several sizes."""
    sizes = _sizes(node)
    if sizes is None or all(isinstance(s, int) for s in tools.shape(node)):
        return None if sizes is None else math.prod(sizes)
    return hint(tools.numel(tools.shape(node)))

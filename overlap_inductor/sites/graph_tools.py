# SPDX-License-Identifier: Apache-2.0
"""Small helpers that answer questions about the FX nodes of a post-grad graph."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten

RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.expand.default,
}
SAME = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
}
SPLITS = {aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default}


def value(node: Any) -> Any:
    return node.meta.get("val")


def shape(node: Any) -> list[Any]:
    return list(value(node).shape)


def dtype(node: Any) -> torch.dtype:
    return value(node).dtype


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def numel(sizes: list[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def permutation(node: fx.Node) -> list[int] | None:
    """``order`` if ``node`` permutes dims (output dim ``i`` is input dim ``order[i]``), else ``None``."""
    if not is_tensor(node):
        return None
    rank = len(shape(node))
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    if node.target is aten.t.default:
        return [1, 0] if rank == 2 else list(range(rank))
    if node.target in (aten.transpose.int, aten.movedim.int):
        a, b = (int(d) % rank for d in node.args[1:3])
        order = list(range(rank))
        if node.target is aten.transpose.int:
            order[a], order[b] = order[b], order[a]
        else:
            order.insert(b, order.pop(a))
        return order
    return None


def is_reshape(node: fx.Node) -> bool:
    """Whether ``node`` is a view that keeps elements and their order."""
    if node.target not in RESHAPES:
        return False
    return node.target is not aten.expand.default or same_shape(node, node.args[0])


def is_bitcast(node: fx.Node) -> bool:
    """Whether ``node`` is a dtype view between types of the same size (fp8 carried as uint8)."""
    return node.target is aten.view.dtype and dtype(node).itemsize == dtype(node.args[0]).itemsize


def copies(node: fx.Node) -> bool:
    return is_bitcast(node) or node.target in SAME


def is_cast(node: fx.Node) -> bool:
    """Whether ``node`` is a copy, a change of dtype, or a reinterpretation of the bits."""
    casts = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
    return node.target in SAME or node.target in casts or is_bitcast(node)


def is_pointwise(node: fx.Node) -> bool:
    return is_cast(node) or operators.has_tag(node, torch.Tag.pointwise)


def same_shape(a: Any, b: Any) -> bool:
    """Whether both are known to have the same shape. Adds no guard."""
    return len(shape(a)) == len(shape(b)) and all(map(same_size, shape(a), shape(b)))


def is_contiguous(node: Any) -> bool:
    """Whether a tensor is contiguous for all values of its symbolic sizes. Adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(shape(node)), reversed(value(node).stride()), strict=True):
        if not (isinstance(size, int) and size == 1) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if is_tensor(source):
            yield source


def depends_on(node: fx.Node, target: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether ``node`` is ``target`` or is computed from it. ``known`` caches answers for one ``target``.

    The search is a loop and not a recursion, because graphs are deep.
    """
    stack = [node]
    while stack:
        current = stack[-1]
        if current in known:
            stack.pop()
            continue
        if current is target or current < target:
            known[current] = current is target
            stack.pop()
            continue
        inputs = current.all_input_nodes
        if any(known.get(i) for i in inputs):
            known[current] = True
            stack.pop()
            continue
        pending = [i for i in inputs if i not in known]
        if pending:
            stack.extend(pending)
        else:
            known[current] = False
            stack.pop()
    return known[node]


def walk(starts: Iterable[fx.Node], visit: Callable[[fx.Node], bool]) -> None:
    """Call ``visit`` on the users of ``starts``. If it returns ``True`` for a node, also on the node's users. Each node
    is visited once, in graph order."""
    pending = list({user for node in starts for user in node.users})
    seen = set(pending)
    heapq.heapify(pending)
    while pending:
        node = heapq.heappop(pending)
        if visit(node):
            for user in node.users:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(pending, user)


def is_scalar_like(node: fx.Node) -> bool:
    return all(isinstance(s, int) and s == 1 for s in shape(node))


def size_text(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def has_unbacked(sizes: list[Any]) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(bool(free_unbacked_symbols(s)) for s in sizes if isinstance(s, torch.SymInt))


def written_between(first: fx.Node, last: fx.Node, read: list[fx.Node]) -> bool:
    """Whether a node between ``first`` and ``last`` writes in place to a tensor in ``read``. If so, a node that reads
    this tensor must not move from ``first`` to ``last``, or from ``last`` to ``first``."""
    node = first.next
    while node is not last:
        if any(argument in read for argument in operators.written(node)):
            return True
        node = node.next
    return False

"""Padding before a reduce-scatter, moved up to the matmul's operand: uneven shards become even ones that the finder knows.

DTensor pads uneven shards so that a reduce-scatter can serve: the matmul's result is split, the last pieces are padded with zeros, and all
are put together again. A zero row of the left operand gives a zero row of the product, so padding the operand says the same::

    mm [33, n] -> split(9) -> pad the last -> cat [36, n]      becomes      pad(lhs) [36, k] -> mm [36, n]

(Where the right operand holds an infinity the padding rows hold NaN, as do the others; whoever padded cuts them off.)

Contract: ``move_up`` adds nodes and redirects the users of the padded tensor to them; nothing is erased, so ``take_back`` can undo it for
the sites that are not overlapped after all. Both know nodes by name, because a failed rewrite puts a copy of the graph in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes import graph_tools as tools
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten


@dataclass(frozen=True)
class Moved:
    """``padded`` was read by ``collective``'s input; ``replacement`` is read now. ``added`` in graph order. All are nodes' names."""

    collective: str
    padded: str
    replacement: str
    added: tuple[str, ...]


def move_up(graph: fx.Graph) -> list[Moved]:
    """Rewrite every padded matmul result before a reduce-scatter; returns what was done."""
    moved = []
    for node in list(graph.nodes):
        if operators.qualified_name(node) == ("_c10d_functional", "reduce_scatter_tensor"):
            for padded in _candidates(node.args[0]):
                found = _unpadded(padded)
                if found is not None and _feeds_only(found[0], padded) and (added := _pad_operand(padded, *found)):
                    padded.replace_all_uses_with(added[-1])
                    moved.append(Moved(node.name, padded.name, added[-1].name, tuple(n.name for n in added)))
                    break
    return moved


def take_back(graph: fx.Graph, moved: list[Moved], overlapped: set[str]) -> list[Moved]:
    """Undo what was done for collectives whose names are not in ``overlapped``; returns what stays."""
    nodes = {n.name: n for n in graph.nodes}
    for one in moved:
        if one.collective not in overlapped:
            nodes[one.replacement].replace_all_uses_with(nodes[one.padded])
            for name in reversed(one.added):
                graph.erase_node(nodes[name])
    return [one for one in moved if one.collective in overlapped]


def _candidates(source: Any) -> list[fx.Node]:
    """The collective's input, and what it holds where that is a scatter of an inner dim (``cat(split(x, dim=d), 0)``)."""
    if not tools.is_tensor(source):
        return []
    found = [source]
    if source.target is aten.cat.default and (piece := tools.piece_of(source.args[0][0])) is not None:
        found.append(piece.base)
    return found


def _unpadded(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """``(x, dim, rows added)`` where ``node`` is ``x`` with zeros after the end of one dim, in whatever spelling."""
    if node.target is aten.constant_pad_nd.default:
        padding = _end_padding(node)
        return None if padding is None else (node.args[0], *padding)  # type: ignore[return-value]
    if node.target is not aten.cat.default:
        return None
    dim = operators.argument(node, "dim") % len(tools.shape(node))
    base: fx.Node | None = None
    covered = 0
    for piece in node.args[0]:  # type: ignore[union-attr]
        while _is_copy(piece):  # type: ignore[arg-type]
            piece = piece.args[0]  # type: ignore[union-attr, assignment]
        added = 0
        if piece.target is aten.constant_pad_nd.default:  # type: ignore[union-attr]
            padding = _end_padding(piece)  # type: ignore[arg-type]
            if padding is None or padding[0] != dim:
                return None
            piece, added = piece.args[0], padding[1]  # type: ignore[union-attr, assignment]
        if tools.shape(piece)[dim] == 0:  # type: ignore[arg-type]
            continue
        found = tools.piece_of(piece)  # type: ignore[arg-type]
        if found is None and base is None:
            found = tools.Piece(piece, dim, 0)  # type: ignore[arg-type]
        # Only the last piece that holds anything may be padded.
        if found is None or found.dim != dim or found.start != covered or (base is not None and found.base is not base):
            return None
        base, covered = found.base, covered + tools.shape(piece)[dim]  # type: ignore[arg-type]
        if added and covered != tools.shape(base)[dim]:
            return None
    sizes = (covered, tools.shape(node)[dim])
    if base is None or not all(isinstance(s, int) for s in sizes) or sizes[0] == sizes[1] or covered != tools.shape(base)[dim]:
        return None
    return base, dim, sizes[1] - sizes[0]


def _is_copy(node: fx.Node) -> bool:
    """A copy, also spelled as a padding by nothing."""
    pads = node.target is aten.constant_pad_nd.default
    return node.target in tools.SAME or (pads and all(isinstance(a, int) and a == 0 for a in operators.argument(node, "pad")))


def _feeds_only(source: fx.Node, padded: fx.Node) -> bool:
    """Whether nothing else needs ``source``: it would have to be computed twice."""
    pending = list(source.users)
    while pending:
        node = pending.pop()
        if node is padded:
            continue
        piece = node.target in tools.SPLITS or node.target in tools.SAME or tools.piece_of(node) is not None
        if not piece and node.target is not aten.constant_pad_nd.default:
            return False
        if not node.users:
            return False
        pending += node.users
    return True


def _end_padding(node: fx.Node) -> tuple[int, int] | None:
    """``(dim, rows)`` that a ``constant_pad_nd`` adds at the end of one dim, with zeros."""
    amounts, value = list(operators.argument(node, "pad")), operators.argument(node, "value", 0)
    added = [(i, a) for i, a in enumerate(amounts) if not (isinstance(a, int) and a == 0)]
    if value != 0 or len(added) != 1 or added[0][0] % 2 == 0 or not isinstance(added[0][1], int) or added[0][1] < 0:
        return None
    return len(tools.shape(node)) - 1 - added[0][0] // 2, added[0][1]


def _pad_operand(padded: fx.Node, source: fx.Node, dim: int, rows: int) -> list[fx.Node]:
    """The nodes that compute ``padded`` from padded operands; none where ``source`` is not a matmul, or a view of one that keeps its rows."""
    matmul = source.args[0] if tools.is_reshape(source) else source
    if getattr(matmul, "target", None) is not aten.mm.default or any(u is not source for u in matmul.users if source is not matmul):  # type: ignore[union-attr]
        return []
    shape = tools.shape(source)
    if any(not isinstance(s, int) for s in shape) or shape[-1] != tools.shape(matmul)[1]:  # type: ignore[arg-type]
        return []
    left, right = matmul.args  # type: ignore[union-attr]
    made: list[fx.Node] = []
    with padded.graph.inserting_before(padded):

        def call(target: Any, *args: Any) -> fx.Node:
            node = padded.graph.call_function(target, args)
            node.meta = {k: v for k, v in matmul.meta.items() if k != "val"}  # type: ignore[union-attr]
            values = fx.map_arg(args, lambda n: n.meta["val"])
            with operators.fake_mode(values):
                node.meta["val"] = target(*values)
            made.append(node)
            return node

        wide = [*shape[:dim], shape[dim] + rows, *shape[dim + 1 :]]
        if dim == len(shape) - 1:
            right = call(aten.constant_pad_nd.default, right, [0, rows], 0.0)
        else:
            inner = tools.shape(left)[1]
            left = left if len(shape) == 2 else call(aten.reshape.default, left, [*shape[:-1], inner])
            left = call(aten.constant_pad_nd.default, left, [0, 0] * (len(shape) - 1 - dim) + [0, rows], 0.0)
            left = left if len(shape) == 2 else call(aten.reshape.default, left, [tools.numel(wide[:-1]), inner])
        product = call(aten.mm.default, left, right)
        if source is not matmul:
            call(aten.reshape.default, product, wide)
    return made

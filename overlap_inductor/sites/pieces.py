# SPDX-License-Identifier: Apache-2.0
"""Recognise pieces of a tensor (slices and elements of splits), and tensors to which zeros are appended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = tools.aten


@dataclass(frozen=True)
class Piece:
    """The ``length`` indices ``start, start + step, ...`` of ``base`` along ``dim``."""

    base: fx.Node
    dim: int
    start: Size
    length: Size
    step: int = 1


def piece_of(node: Any) -> Piece | None:
    """``node`` as a piece, if it is a slice or an element of a split; else ``None``. Also ``None`` for a negative start
    in a dim of symbolic size."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.slice.Tensor:
        base, dim = node.args[0], operators.argument(node, "dim")
        start = operators.argument(node, "start") or 0
        start = start.meta["val"] if isinstance(start, fx.Node) else start
        if isinstance(start, int) and start < 0:
            size = tools.shape(base)[dim]
            if not isinstance(size, int):
                return None
            start = max(start + size, 0)
        return Piece(base, dim, start, tools.shape(node)[dim], operators.argument(node, "step"))
    if (
        getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
        and node.args[0].target in tools.SPLITS
    ):
        split, index = node.args
        dim = operators.argument(split, "dim")
        lengths = [v.shape[dim] for v in split.meta["val"]]
        return Piece(split.args[0], dim, sum(lengths[:index]), lengths[index])
    return None


def may_be_a_piece(node: fx.Node) -> bool:
    """Whether ``node`` is a slice, a split, an element of a result, a copy or a bitcast."""
    is_element = getattr(node.target, "__name__", "") == "getitem"
    return (
        is_element
        or node.target is aten.slice.Tensor
        or node.target in tools.SPLITS
        or node.target in tools.SAME
        or tools.is_bitcast(node)
    )


def behind_copies(node: Any) -> Any:
    """The tensor from which ``node`` is made by copies and bitcasts alone, or ``node`` itself."""
    while isinstance(node, fx.Node) and (tools.is_bitcast(node) or node.target in tools.SAME):
        node = node.args[0]
    return node


def appended_to(node: fx.Node) -> tuple[fx.Node, int] | None:
    """``(x, dim)`` if ``node`` is ``x`` with zeros appended along ``dim``, else ``None``. ``node`` is a padding, or a
    ``cat`` whose last pieces are padded (DTensor's uneven shards). If a size along ``dim`` is symbolic, the result is
    ``None``."""
    if node.target is aten.constant_pad_nd.default:
        found = padded(node)
        return found if found is not None and isinstance(tools.shape(found[0])[found[1]], int) else None
    if node.target is not aten.cat.default:
        return None
    dim = operators.argument(node, "dim") % len(tools.shape(node))
    source: fx.Node | None = None
    rows, ended = 0, False
    for part in node.args[0]:
        inner, short = part, False
        if isinstance(part, fx.Node) and (found := padded(part)) is not None and found[1] == dim:
            inner, short = found[0], True
        if not tools.is_tensor(inner):
            return None
        if same_size(tools.shape(inner)[dim], 0):
            ended = True
            continue
        piece = piece_of(behind_copies(inner)) or Piece(inner, dim, 0, tools.shape(inner)[dim])
        if not all(isinstance(n, int) for n in (piece.start, piece.length, tools.shape(piece.base)[piece.dim])):
            return None
        if (
            ended
            or piece.step != 1
            or piece.dim != dim
            or not same_size(piece.start, rows)
            or (source or piece.base) is not piece.base
        ):
            return None
        source, rows, ended = piece.base, rows + piece.length, short
    if source is None or tools.shape(source)[dim] != rows or tools.shape(node)[dim] == rows:
        return None
    return source, dim


def padded(node: fx.Node) -> tuple[fx.Node, int] | None:
    """``(x, dim)`` if ``node`` pads ``x`` with zeros at the end of exactly one dim, else ``None``."""
    if node.target is not aten.constant_pad_nd.default or operators.argument(node, "value") != 0:
        return None
    amounts: Any = node.args[1]
    given = [i for i, a in enumerate(amounts) if not isinstance(a, int) or a]
    if len(given) != 1 or given[0] % 2 == 0 or not isinstance(amounts[given[0]], int) or amounts[given[0]] < 0:
        return None
    return node.args[0], len(tools.shape(node)) - 1 - given[0] // 2

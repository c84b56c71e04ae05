# SPDX-License-Identifier: Apache-2.0
"""Recognise the ``cat`` after an all-gather that puts the ranks' slices side by side."""

from __future__ import annotations

from typing import Any

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.pieces import piece_of
from overlap_inductor.torch_compat import operators

aten = tools.aten


def joined_columns(wait: fx.Node, world_size: int, columns: Size) -> fx.Node | None:
    """The ``cat`` that has, for each row, ``columns`` elements of each rank in the ranks' order::

        pieces = split(wait [W * m, ..., n], m)
        cat(pieces, -1)                                 # [m, ..., W * n]

    ``None`` if anything else reads the gathered tensor ``wait``, or its pieces.
    """
    readers = [u for user in wait.users for u in (user.users if user.target in tools.SPLITS else [user])]
    joins = {join for reader in readers for join in reader.users}
    if len(joins) != 1 or not all(piece_of(reader) is not None for reader in readers):
        return None
    (join,) = joins
    if join.target is not aten.cat.default or len(join.args[0]) != world_size:
        return None
    size = tools.shape(wait)[0] // world_size
    for rank, part in enumerate(join.args[0]):
        piece = piece_of(part)
        if (
            piece is None
            or piece.base is not wait
            or piece.dim != 0
            or piece.step != 1
            or not same_size(piece.start, rank * size)
            or not same_size(piece.length, size)
        ):
            return None
    dim = operators.argument(join, "dim") % len(tools.shape(join))
    width: Any = tools.numel(tools.shape(join.args[0][0])[dim:])
    return join if dim > 0 and same_size(width, columns) else None

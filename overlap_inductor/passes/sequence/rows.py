# SPDX-License-Identifier: Apache-2.0
"""Tensors that are held as rows: each rank of a group holds ``ceil(T / W)`` of their T tokens.

The leading dims of such a tensor together have T elements: ``[T, H]``, ``[B, S, H]`` with ``B * S = T``. Its other dims
are its features. A rank's rows have shape ``[ceil(T / W), *features]``. No result of the graph may depend on rows
beyond the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size


@dataclass(frozen=True)
class Tokens:
    """The tokens that the ranks of one group divide among them.

    Attributes:
        world_size: number of the group's ranks, W.
        count: number of tokens, T: an int or a symbolic size.
    """

    group_name: str
    world_size: int
    count: Size

    def same(self, other: Tokens) -> bool:
        return self.group_name == other.group_name and same_size(self.count, other.count)

    @property
    def shard(self) -> Size:
        """The number of one rank's rows: ``ceil(T / W)``."""
        return self.count // self.world_size if self.even else (self.count + self.world_size - 1) // self.world_size

    @property
    def padded(self) -> Size:
        """The number of all ranks' rows, with the rows beyond the last token."""
        return self.count if self.even else (self.count + self.world_size - 1) // self.world_size * self.world_size

    @property
    def even(self) -> bool:
        """Whether W is known to divide T."""
        return same_size(self.count % self.world_size, 0)


@dataclass(frozen=True)
class AllRows(Tokens):
    """Tokens of which each rank holds all rows, with the rows beyond the last token."""

    @classmethod
    def of(cls, tokens: Tokens) -> AllRows:
        return cls(tokens.group_name, tokens.world_size, tokens.count)

    @property
    def shard(self) -> Size:
        return self.padded


@dataclass(frozen=True)
class Rows:
    """How a tensor is held. ``lead``: number of its leading dims that together are the tokens."""

    tokens: Tokens
    lead: int


class NotRowWise(Exception):
    """The op of a node cannot be computed on rows; the message says why."""


def features(node: fx.Node, rows: Rows) -> list[Size]:
    """The sizes of the dims behind the tokens."""
    return tools.shape(node)[rows.lead :]


def local_shape(node: fx.Node, rows: Rows) -> list[Size]:
    return [rows.tokens.shard, *features(node, rows)]


def leading_dims(shape: Sequence[Size], tokens: Size, behind: Sequence[Size]) -> int | None:
    """The number of leading dims of ``shape`` that together have ``tokens`` elements. ``None`` if there is none, or if
    the other dims have another number of elements than a tensor of shape ``behind``."""
    for lead in range(1, len(shape) + 1):
        if same_size(tools.numel(list(shape[:lead])), tokens):
            same = same_size(tools.numel(list(shape[lead:])), tools.numel(list(behind)))
            return lead if same else None
    return None


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1

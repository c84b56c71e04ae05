# SPDX-License-Identifier: Apache-2.0
"""What a site of each pattern computes in stress checks: operand sizes, the call of the op, and the fp64 result.

Every rank draws the operands of all ranks. So every rank computes the right result alone.
"""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap_inductor.lowerings.fused import parameters as fused_plan
from tests.gpu.stress_variants import CONTRACTED
from tests.gpu.stress_variants import GATHER
from tests.gpu.stress_variants import OUTPUT
from tests.gpu.stress_variants import RECEIVED
from tests.gpu.stress_variants import REDUCE
from tests.gpu.stress_variants import SCATTER
from tests.gpu.stress_variants import SENT
from tests.gpu.stress_variants import Variant

Size = tuple[int, int]
Drawn = Callable[[int], torch.Tensor]
"""An operand of a rank in fp64, by the rank's number."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call in a group of ``ranks`` ranks. ``tokens`` is a multiple of ``ranks``. Each pattern gives
    ``inner`` and ``columns`` a meaning."""

    ranks: int
    tokens: int
    inner: int
    columns: int


class Pattern(ABC):
    """A pattern of stress checks. ``planned_as``: the name under which a schedule plans the pattern's workspace."""

    planned_as: str

    def left(self, sizes: Sizes) -> Size:
        """Rows and columns of a rank's left operand. By default, ``[tokens, inner]``. If the collective comes first,
        the rank sends this operand. If this collective is an all-to-all, each rank gets a slice of the operand's
        rows."""
        return sizes.tokens, sizes.inner

    def right(self, sizes: Sizes) -> Size:
        """Rows and columns of a rank's right operand."""
        return sizes.inner, sizes.columns

    def planned_rows(self, sizes: Sizes) -> int:
        """The number of rows in a shard, as the planner counts them."""
        return -(-self.left(sizes)[0] // sizes.ranks)

    @abstractmethod
    def run(
        self, op: Any, chain: torch.Tensor, a: torch.Tensor, b: torch.Tensor, used: bool, settings: str, *where: str
    ) -> torch.Tensor:
        """Call ``op``. If ``used`` is true and the exchange comes first, the result has the columns of the product,
        then the columns of what the rank received. ``where``: the names of the group and of the site."""

    @abstractmethod
    def exact(self, lefts: Sequence[torch.Tensor], right: Drawn, rank: int, used: bool) -> torch.Tensor:
        """The result of ``run`` on ``rank``, in fp64. ``lefts``: the left operands of all ranks."""


class ReceivedFirst(Pattern):
    """The ranks exchange first. Then each rank multiplies the result of the exchange by its own right operand."""

    @abstractmethod
    def operand(self, lefts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The matmul's left operand on ``rank``, after the exchange."""

    def run(
        self, op: Any, chain: torch.Tensor, a: torch.Tensor, b: torch.Tensor, used: bool, settings: str, *where: str
    ) -> torch.Tensor:
        outs, _ = op(chain, a, [b], [None], used, settings, *where)
        return torch.cat(outs, 1) if used else outs[0]

    def exact(self, lefts: Sequence[torch.Tensor], right: Drawn, rank: int, used: bool) -> torch.Tensor:
        operand = self.operand(lefts, rank)
        product = operand @ right(rank)
        return torch.cat([product, operand], 1) if used else product


class Gather(ReceivedFirst):
    """``all_gather(a [tokens / ranks, inner]) @ b``."""

    planned_as = GATHER

    def left(self, sizes: Sizes) -> Size:
        return sizes.tokens // sizes.ranks, sizes.inner

    def planned_rows(self, sizes: Sizes) -> int:
        return self.left(sizes)[0]

    def operand(self, lefts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat(list(lefts))


class Received(ReceivedFirst):
    """``all_to_all(a [tokens, inner]) @ b``."""

    planned_as = RECEIVED

    def operand(self, lefts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat([left.chunk(len(lefts))[rank] for left in lefts])


@dataclass(frozen=True)
class Contracted(ReceivedFirst):
    """``all_to_all(a)`` with the slices side by side, times ``b [ranks * inner, columns]``. ``inner`` is rounded up to
    a multiple of ``block_k``, because schedule ``fused`` needs slices of whole blocks."""

    block_k: int
    planned_as = RECEIVED

    def _inner(self, sizes: Sizes) -> int:
        return -(-sizes.inner // self.block_k) * self.block_k

    def left(self, sizes: Sizes) -> Size:
        return sizes.tokens, self._inner(sizes)

    def right(self, sizes: Sizes) -> Size:
        return sizes.ranks * self._inner(sizes), sizes.columns

    def operand(self, lefts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat([left.chunk(len(lefts))[rank] for left in lefts], 1)


class MultipliedFirst(Pattern):
    """Each rank multiplies its own operands. Then the ranks exchange the products."""

    @abstractmethod
    def result(self, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The result on ``rank`` from the products of all ranks."""

    def run(
        self, op: Any, chain: torch.Tensor, a: torch.Tensor, b: torch.Tensor, used: bool, settings: str, *where: str
    ) -> torch.Tensor:
        return op(chain, a, b, None, settings, "sum", *where)[0]

    def exact(self, lefts: Sequence[torch.Tensor], right: Drawn, rank: int, used: bool) -> torch.Tensor:
        return self.result([left @ right(peer) for peer, left in enumerate(lefts)], rank)


class Reduce(MultipliedFirst):
    """``all_reduce(a [tokens, inner] @ b)``."""

    planned_as = REDUCE

    def result(self, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        total = sum(products)
        assert isinstance(total, torch.Tensor)
        return total


class Scatter(Reduce):
    """``reduce_scatter(a [tokens, inner] @ b)`` of rows."""

    planned_as = SCATTER

    def result(self, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return super().result(products, rank).chunk(len(products))[rank]


@dataclass(frozen=True)
class Sent(MultipliedFirst):
    """``all_to_all(a @ b)``. The result is ``[tokens, columns]``.

    - of rows: ``a [tokens, inner]``, ``b [inner, columns]``;
    - ``by_columns``: ``a [tokens / ranks, inner]``, ``b [inner, ranks * columns]``.
    """

    by_columns: bool
    planned_as = SENT

    def left(self, sizes: Sizes) -> Size:
        return sizes.tokens // (sizes.ranks if self.by_columns else 1), sizes.inner

    def right(self, sizes: Sizes) -> Size:
        return sizes.inner, sizes.columns * (sizes.ranks if self.by_columns else 1)

    def run(
        self, op: Any, chain: torch.Tensor, a: torch.Tensor, b: torch.Tensor, used: bool, settings: str, *where: str
    ) -> torch.Tensor:
        return op(chain, a, b, None, self.by_columns, settings, *where)[0]

    def result(self, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat([p.chunk(len(products), int(self.by_columns))[rank] for p in products])


@dataclass(frozen=True)
class Output(MultipliedFirst):
    """``all_gather(a [tokens, inner] @ b)``: the ranks' products, one below the other, or ``side_by_side``."""

    side_by_side: bool
    planned_as = OUTPUT

    def run(
        self, op: Any, chain: torch.Tensor, a: torch.Tensor, b: torch.Tensor, used: bool, settings: str, *where: str
    ) -> torch.Tensor:
        return op(chain, a, b, None, self.side_by_side, settings, *where)[0]

    def result(self, products: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat(list(products), int(self.side_by_side))


def pattern_of(variant: Variant) -> Pattern:
    """The pattern that ``variant`` calls."""
    if variant.pattern == CONTRACTED:
        return Contracted(variant.fixed.get("block_k", fused_plan.CONTRACTED))
    if variant.pattern == SENT:
        return Sent(variant.by_columns)
    if variant.pattern == OUTPUT:
        return Output(variant.by_columns)
    return {GATHER: Gather, RECEIVED: Received, SCATTER: Scatter, REDUCE: Reduce}[variant.pattern]()

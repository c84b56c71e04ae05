# SPDX-License-Identifier: Apache-2.0
"""The looping ops that reduce sums of experts' rows. They run the loops of ``looped_reduce_ops``, but a grouped matmul
computes the rows.

Shapes: ``lhs [S, K]`` and ``rhs [E, K, N]``. ``ends [E]``: where each expert's rows of ``lhs`` end. ``places [T, k]``:
the rows of ``lhs @ rhs`` that each token sums. ``mask [S, 1]``: rows that count as zeros. ``shares [S, 1]``: a factor
for each row. ``operator``: ``namespace::name`` of the grouped matmul. The result has T rows. (``grouped_rows`` writes
the same steps into the graph.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.ring.looped_reduce_ops import Rows
from overlap_inductor.lowerings.ring.looped_reduce_ops import all_reduce_rows
from overlap_inductor.lowerings.ring.looped_reduce_ops import reduce_scatter_rows
from overlap_inductor.torch_compat.distributed import resolve_group


def sums_of_experts(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    mask: torch.Tensor | None,
    shares: torch.Tensor | None,
    operator: str,
    dtype: torch.dtype,
) -> Rows:
    """Returns a function ``compute(tokens)``. For each token of the slice ``tokens``, it sums the rows of the token's
    experts."""
    namespace, name = operator.split("::")
    multiply = getattr(getattr(torch.ops, namespace), name)
    bounds = ends.to(places.dtype)

    def compute(tokens: slice) -> torch.Tensor:
        mine = places[tokens]
        if not mine.numel():
            return lhs.new_zeros(mine.shape[0], rhs.shape[-1], dtype=dtype)
        ordered = mine.reshape(-1).sort().values
        y = multiply(lhs[ordered], rhs, torch.searchsorted(ordered, bounds, out_int32=True))
        if mask is not None:
            y = y.masked_fill(mask[ordered], 0)
        if shares is not None:
            y = y * shares[ordered]
        return y[torch.searchsorted(ordered, mine)].sum(1).to(dtype)

    return compute


def _op(reduce: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op that reduces the sums of experts by ``reduce``: ``all_reduce_rows`` or ``reduce_scatter_rows``."""

    def op(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        ends: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor | None,
        shares: torch.Tensor | None,
        operator: str,
        parts: int,
        min_rows: int,
        dtype: torch.dtype,
        *where: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = sums_of_experts(lhs, rhs, ends, places, mask, shares, operator, dtype)
        shape = places.shape[0], rhs.shape[-1]
        return reduce(compute, shape, lhs, parts, min_rows, dtype, *where), chain.new_empty(1)

    return op


def _fake(scatters: bool) -> Any:
    def fake(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        ends: torch.Tensor,
        places: torch.Tensor,
        mask: object,
        shares: object,
        operator: str,
        parts: int,
        min_rows: int,
        dtype: torch.dtype,
        reduce_op: str,
        group_name: str,
        *where: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = places.shape[0] // (resolve_group(group_name).size() if scatters else 1)
        return lhs.new_empty(rows, rhs.shape[-1], dtype=dtype), chain.new_empty(1)

    return fake


_ARGUMENTS = (
    "(Tensor chain, Tensor lhs, Tensor rhs, Tensor ends, Tensor places, Tensor? mask, Tensor? shares, str operator, int"
    " parts, SymInt min_rows, ScalarType dtype, str reduce_op, str group_name, str site, str transport='') -> (Tensor,"
    " Tensor)"
)
define(f"grouped_matmul_all_reduce{_ARGUMENTS}", _op(all_reduce_rows), _fake(scatters=False))
define(f"grouped_matmul_reduce_scatter{_ARGUMENTS}", _op(reduce_scatter_rows), _fake(scatters=True))

# SPDX-License-Identifier: Apache-2.0
"""The looping ops that sum experts' rows for each token, and reduce these sums over the ranks. A ``RowProgram``
computes the rows.

There are S rows, in the order of their E experts, and T tokens:

- ``places [T, k]``: for each token, the numbers of the k rows that are summed.
- ``ends [E]``: where each expert's rows end.
- Input i of the program has S rows: ``sources[i][indices[i]]``, or ``sources[i]`` if ``indices[i]`` is ``None``. One
  run of the program computes the rows of a slice of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.ring.looped_reduce_ops import Rows
from overlap_inductor.lowerings.ring.looped_reduce_ops import all_reduce_rows
from overlap_inductor.lowerings.ring.looped_reduce_ops import reduce_scatter_rows
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.sites.row_program import from_text
from overlap_inductor.torch_compat.distributed import resolve_group


def sums_of_experts(
    sources: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor | None],
    whole: Sequence[torch.Tensor],
    ends: torch.Tensor,
    places: torch.Tensor,
    program: RowProgram,
    dtype: torch.dtype,
) -> Rows:
    """A function that sums, for each token of a slice of tokens, the rows of the token's experts."""
    bounds = ends.to(places.dtype)

    def compute(tokens: slice) -> torch.Tensor:
        mine = places[tokens]
        if not mine.numel():
            return places.new_zeros(mine.shape[0], program.width, dtype=dtype)
        ordered = mine.reshape(-1).sort().values
        rows = [x[ordered if i is None else i[ordered]] for x, i in zip(sources, indices, strict=True)]
        values = program.run(rows, whole, torch.searchsorted(ordered, bounds, out_int32=True))
        return values[program.result][torch.searchsorted(ordered, mine)].sum(1).to(dtype)

    return compute


def _op(reduce: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:

    def op(
        chain: torch.Tensor,
        sources: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor | None],
        whole: Sequence[torch.Tensor],
        ends: torch.Tensor,
        places: torch.Tensor,
        program: str,
        parts: int,
        min_rows: int,
        dtype: torch.dtype,
        *where: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parsed = from_text(program)
        compute = sums_of_experts(sources, indices, whole, ends, places, parsed, dtype)
        shape = places.shape[0], parsed.width
        return reduce(compute, shape, places, parts, min_rows, dtype, *where), chain.new_empty(1)

    return op


def _fake(scatters: bool) -> Any:
    def fake(
        chain: torch.Tensor,
        sources: object,
        indices: object,
        whole: object,
        ends: torch.Tensor,
        places: torch.Tensor,
        program: str,
        parts: int,
        min_rows: int,
        dtype: torch.dtype,
        reduce_op: str,
        group_name: str,
        *where: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = places.shape[0] // (resolve_group(group_name).size() if scatters else 1)
        return places.new_empty(rows, from_text(program).width, dtype=dtype), chain.new_empty(1)

    return fake


_ARGUMENTS = (
    "(Tensor chain, Tensor[] sources, Tensor?[] indices, Tensor[] whole, Tensor ends, Tensor places, str program, int"
    " parts, SymInt min_rows, ScalarType dtype, str reduce_op, str group_name, str site, str transport='') -> (Tensor,"
    " Tensor)"
)
define(f"grouped_matmul_all_reduce{_ARGUMENTS}", _op(all_reduce_rows), _fake(scatters=False))
define(f"grouped_matmul_reduce_scatter{_ARGUMENTS}", _op(reduce_scatter_rows), _fake(scatters=True))

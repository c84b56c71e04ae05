# SPDX-License-Identifier: Apache-2.0
"""The ``Pattern.example`` of each pattern that has one: the pattern as a model writes it, for benchmarks and tests.

::

    ALL_GATHER_MATMUL       all_gather(x, dim 0) @ w          w: the rank's columns
    MATMUL_REDUCE_SCATTER   reduce_scatter(x @ w, dim 0)      w: the rank's rows
    MATMUL_ALL_REDUCE       all_reduce(x @ w)                 w: the rank's rows
    MATMUL_ALL_GATHER       all_gather(x @ w, dim 1)          w: the rank's columns
    MATMUL_ALL_TO_ALL       all_to_all(x @ w, dim 0)          w: the rank's rows
    ALL_TO_ALL_MATMUL       all_to_all(x, dim 0) @ w          w: the rank's columns
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_inductor.passes.pattern import Example
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import all_to_all
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def _reduced(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


ALL_GATHER_MATMUL = Example(
    first=True,
    shards_tokens=True,
    column_parallel=True,
    traced=lambda x, group: all_gather(x, 0, group),
    eager=_gathered,
)
MATMUL_REDUCE_SCATTER = Example(
    first=False,
    shards_tokens=True,
    column_parallel=False,
    traced=lambda x, group: reduce_scatter(x, "sum", 0, group),
    eager=_scattered,
)
MATMUL_ALL_REDUCE = Example(
    first=False,
    shards_tokens=False,
    column_parallel=False,
    traced=lambda x, group: all_reduce(x, "sum", group),
    eager=_reduced,
)
MATMUL_ALL_GATHER = Example(
    first=False,
    shards_tokens=False,
    column_parallel=True,
    traced=lambda x, group: all_gather(x, 1, group),
    eager=lambda x, group: torch.cat(_gathered(x, group).chunk(group.size()), dim=1),
)
MATMUL_ALL_TO_ALL = Example(
    first=False,
    shards_tokens=False,
    column_parallel=False,
    traced=lambda x, group: all_to_all(x, group),
    eager=_exchanged,
)
ALL_TO_ALL_MATMUL = Example(
    first=True,
    shards_tokens=False,
    column_parallel=True,
    traced=lambda x, group: all_to_all(x, group),
    eager=_exchanged,
)

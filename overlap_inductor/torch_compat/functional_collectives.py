# SPDX-License-Identifier: Apache-2.0
"""Functional collectives under one name on every supported version of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from overlap_inductor.torch_compat.versions import release
from overlap_inductor.torch_compat.versions import torch_version

_all_gather: Any = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter: Any = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
all_reduce = funcol.all_reduce
_BREAKS_THE_GRAPH = (release(torch_version()) or (0, 0)) < (2, 13)
"""Whether torch's all-gather breaks the graph if its dim is not 0."""


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather ``x`` along ``dim``. If torch's function would break the graph, gather along dim 0 and move the
    shards."""
    if dim == 0 or not _BREAKS_THE_GRAPH:
        return _all_gather(x, dim, group)
    stacked = _all_gather(x, 0, group)
    world_size = group.size()
    if all(s == 1 for s in x.shape[:dim]):
        return stacked.view([*x.shape[:dim], world_size * x.shape[dim], *x.shape[dim + 1 :]])
    return torch.cat(stacked.chunk(world_size, 0), dim)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank an equal part of the rows of ``x``."""
    return funcol.all_to_all_single(x, None, None, group)

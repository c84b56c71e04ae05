"""One process that is any rank of any world: a fake process group, and the overlap pass on the graphs compiled under
it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport

_all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
all_reduce = funcol.all_reduce


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """An all-gather on ``dim``. Those of torch 2.11 and 2.12 break the graph where ``dim`` is not 0, so its last step
    is written out there."""
    if dim == 0 or not torch.__version__.startswith(("2.11", "2.12")):
        return _all_gather(x, dim, group)
    stacked = _all_gather(x, 0, group)
    world_size = group.size()
    if all(s == 1 for s in x.shape[:dim]):
        return stacked.view([*x.shape[:dim], world_size * x.shape[dim], *x.shape[dim + 1 :]])
    return torch.cat(stacked.chunk(world_size, 0), dim)


@contextmanager
def fake_group(world_size: int = 2, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A default group of ``world_size`` ranks in which this process is ``rank``; its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def reports_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **fields: Any) -> list[OverlapReport]:
    """The reports of the graphs of ``fn``, with schedule ``ring`` unless ``fields`` say otherwise."""
    from overlap_inductor.switch.explain import explain

    if dynamic:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dim() and not isinstance(arg, torch.nn.Parameter):
                torch._dynamo.mark_dynamic(arg, 0)
    return explain(fn, *args, config=OverlapConfig(**{"schedule": "ring", **fields})).reports


def report_of(fn: Callable[..., Any], *args: Any, **fields: Any) -> OverlapReport:
    (report,) = reports_of(fn, *args, **fields)
    return report

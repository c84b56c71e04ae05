# SPDX-License-Identifier: Apache-2.0
"""Makes fake process groups, in which one process acts as any rank of a group of any size. Collects the reports of the
graphs that are compiled in such a group."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport


@contextmanager
def fake_group(world_size: int = 2, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A default group of ``world_size`` ranks in which this process is ``rank``. Its collectives move no data. On exit,
    the group is destroyed and Dynamo is reset."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def reports_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **fields: Any) -> list[OverlapReport]:
    """The reports of the graphs that ``fn(*args)`` compiles.

    Args:
        dynamic: mark dim 0 of every tensor in ``args`` as dynamic, but not of parameters and scalars.
        fields: fields of ``OverlapConfig``. By default, the schedule is ``ring`` and ``sequence_parallel`` is ``off``.
    """
    from overlap_inductor.switch.explain import explain

    if dynamic:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dim() and not isinstance(arg, torch.nn.Parameter):
                torch._dynamo.mark_dynamic(arg, 0)
    defaults = {"schedule": "ring", "sequence_parallel": "off"}
    return explain(fn, *args, config=OverlapConfig(**{**defaults, **fields})).reports


def report_of(fn: Callable[..., Any], *args: Any, **fields: Any) -> OverlapReport:
    """The report of the only graph that ``fn(*args)`` compiles (see ``reports_of``). Raises ``ValueError`` if
    ``fn`` compiles no graph or several."""
    (report,) = reports_of(fn, *args, **fields)
    return report

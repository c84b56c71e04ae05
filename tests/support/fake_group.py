# SPDX-License-Identifier: Apache-2.0
"""Fake process groups, and the reports of graphs compiled in them. One process acts as any rank of a group of any
size."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
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


def reports_by_fields(
    fn: Callable[..., Any], *args: Any, several: Sequence[dict[str, Any]], **fields: Any
) -> list[list[OverlapReport]]:
    """``[reports_of(fn, *args, **fields, **one) for one in several]``, but ``fn`` is traced once: each configuration
    rewrites a copy of the graph. The pass on the joint graph runs once, with ``fields`` only."""
    from overlap_inductor.inductor import post_grad
    from overlap_inductor.inductor.compile_scope import CompileScope
    from overlap_inductor.switch.backend import compile_with

    defaults = {"schedule": "ring", "sequence_parallel": "off", **fields}
    found: list[list[OverlapReport]] = [[] for _ in several]

    def compile_one(gm: torch.fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
        for one, reports in zip(several, found, strict=True):
            graph = torch.fx.Graph()
            graph.output(graph.graph_copy(gm.graph, {}))
            copied = torch.fx.GraphModule(gm, graph)
            copied.graph.output_node().meta.update(gm.graph.output_node().meta)
            scope = CompileScope.of(keywords)
            scope.pinned, scope.config = True, OverlapConfig(**{**defaults, **one})
            post_grad.run_post_grad_passes(copied, example_inputs, scope)
            reports.extend(scope.take_reports())
        return post_grad.zeros_like_outputs(copied)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return compile_with(OverlapConfig(**defaults), gm, example_inputs, None, {}, inner_compile=compile_one)

    torch._dynamo.reset()
    with post_grad.every_graph_compiled_now():
        torch.compile(fn, backend=backend)(*args)
    torch._dynamo.reset()
    return found


def report_of(fn: Callable[..., Any], *args: Any, **fields: Any) -> OverlapReport:
    """The report of the only graph that ``fn(*args)`` compiles. Raises ``ValueError`` if there is not exactly one."""
    (report,) = reports_of(fn, *args, **fields)
    return report

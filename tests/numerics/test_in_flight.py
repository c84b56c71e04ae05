# SPDX-License-Identifier: Apache-2.0
"""Traces generated code, and checks that transfers are in flight during the matmuls that should hide them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks

Span = tuple[float, float]


def _trace(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """``{"gather ring": {event: [(start, end) in microseconds], "site": the site's id}, ...}``, for each pattern with
    schedules ``ring`` and ``keep``. A send or receive lasts from its start to the end of its wait."""
    import overlap_inductor

    group = dist.group.WORLD
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "gather": lambda x, w: all_gather(x[:64], 0, group) @ w,
        "scatter": lambda x, w: reduce_scatter(x @ w, "sum", 0, group),
    }
    compile_anew()
    found = {}
    for name, function in functions.items():
        inputs = torch.randn(64 * world_size, 64), torch.randn(64, 64)
        for fields in ({"schedule": "ring"}, {"schedule": "keep"}):
            torch._dynamo.reset()
            with overlap_inductor.overlap(sub_chunks=2, **fields):
                compiled: Any = torch.compile(function)
                compiled(*inputs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                compiled(*inputs)
            spans: dict[str, list[Span]] = {}
            for event in profile.events():
                spans.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
            report = overlap_inductor.last_report()
            found[f"{name} {fields['schedule']}"] = {k: sorted(v) for k, v in spans.items()} | {
                "site": report.sites[0].facts.id if report else ""
            }
    return found


def _under(matmul: Span, transfers: list[Span]) -> int:
    """The number of transfers that began before the matmul and were awaited after it."""
    return sum(start < matmul[0] and matmul[1] < end for start, end in transfers)


def test_transfers_are_in_flight_while_matmuls_run() -> None:
    """Transfers and matmuls may run one after the other even if the steps in the graph are in the right order. So the
    test reads a trace. It uses three ranks, and two sub-chunks for each shard."""
    for trace in run_ranks(3, _trace):
        gather, scatter = trace["gather ring"], trace["scatter ring"]
        # The site's id must be the same in the report, in the graph and in the trace.
        for name, found, ops in (
            ("gather", gather, ("gather_start", "gather_step")),
            ("scatter", scatter, ("exchange_start", "exchange_send", "exchange_wait")),
        ):
            assert found["site"] and all(f"overlap_inductor::{op} {found['site']}" in found for op in ops), sorted(
                found
            )
            assert not any(key.startswith("overlap_inductor::") for key in trace[f"{name} keep"])
        # Gather: the rank multiplies its own shard, then 2 x 2 sub-chunks. Hops are in flight during every matmul but
        # the last.
        assert len(gather["aten::mm"]) == 5 and len(gather["gloo:recv"]) == 4
        for matmul in gather["aten::mm"][:-1]:
            assert _under(matmul, gather["gloo:recv"]) and _under(matmul, gather["gloo:send"]), trace
        assert not _under(gather["aten::mm"][-1], gather["gloo:recv"])
        # Scatter: the rank computes 2 x 2 partial sums for other ranks. Then it computes the partial sum of its own
        # shard, in two parts or as a whole. Sends are in flight during every matmul but the first.
        assert len(scatter["aten::mm"]) >= 5 and len(scatter["gloo:send"]) == 4
        for matmul in scatter["aten::mm"][1:]:
            assert _under(matmul, scatter["gloo:send"]), trace
        # Without overlap there is one matmul, and no transfer is in flight during it.
        for name in ("gather keep", "scatter keep"):
            (matmul,) = trace[name]["aten::mm"]
            assert not any(_under(matmul, spans) for event, spans in trace[name].items() if "gloo" in event)

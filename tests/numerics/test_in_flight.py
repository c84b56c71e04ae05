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


def _with_gradient(rank: int, world_size: int) -> tuple[list[float], list[tuple[str, float]]]:
    """``(errors of both results, [(op, start)] in order of time)`` of a gather, a matmul and a weight's gradient."""
    import overlap_inductor

    def function(
        x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = dy.t() @ features
        return all_gather(x, 0, dist.group.WORLD) @ w, gradient

    compile_anew()
    torch.manual_seed(rank)
    inputs = torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 200), torch.randn(8, 8192)
    # With ``reorder_for_locality``, Inductor moves the gradient behind the gather before this package's pass runs.
    with overlap_inductor.overlap(sub_chunks=2, schedule="ring"):
        compiled: Any = torch.compile(function, options={"reorder_for_locality": False})
        compiled(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = compiled(*inputs)
    errors = [(f - e).abs().max().item() for f, e in zip(found, function(*inputs), strict=True)]
    # The range of a step whose name has the site's id lies inside the range of the op.
    starts = ("aten::mm", "overlap_inductor::gather_start ", "overlap_inductor::gather_step ")
    events = [(e.name.split(" ")[0], e.time_range.start) for e in profile.events() if e.name.startswith(starts)]
    return errors, sorted(events, key=lambda event: event[1])


def test_pieces_of_a_gradient_run_between_the_waits_of_a_ring() -> None:
    """Three ranks wait four times. The gradient's two pieces run in front of the first and of the third wait."""
    for errors, events in run_ranks(3, _with_gradient):
        assert max(errors) < 1e-4
        names = [name.removeprefix("overlap_inductor::") for name, _ in events]
        expected = ["gather_start"]
        # The own shard and a piece, a sub-chunk, a sub-chunk and a piece, a sub-chunk.
        for matmuls in (2, 1, 2, 1):
            expected += ["aten::mm"] * matmuls + ["gather_step"]
        assert names == [*expected, "aten::mm"]

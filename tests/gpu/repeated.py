# SPDX-License-Identifier: Apache-2.0
"""Repeats calls of sites: with delays, in random order, and in replayed CUDA graphs. Also measures a call's host
time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 15
Repeated = tuple[str, Callable[[], torch.Tensor], torch.Tensor]
"""``(name, call, its first result)``. Every later result must be bitwise equal to the first."""


def _counters(sites: Sequence[Repeated]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1, dtype=torch.int64, device=first.device) for name, _, first in sites}


def _late_call(site: Repeated, wrong: dict[str, torch.Tensor], chance: random.Random) -> None:
    """Make one call and compare its result on the GPU. About one call in five is delayed on this rank."""
    name, call, first = site
    if chance.random() < 0.2:
        torch.cuda._sleep(chance.randrange(200_000))
    wrong[name] += (call() != first).any()


def drawn_calls(
    sites: Sequence[Repeated],
    calls: int,
    rank: int,
    streams: Sequence[torch.cuda.Stream] = (),
    before: Callable[[int], None] = lambda i: None,
) -> dict[str, int]:
    """Call sites in a random order, which is the same on all ranks, with different delays on each rank. Returns the
    number of wrong results by name.

    The random order makes stale data visible: the previous call usually had other inputs.

    Args:
        streams: ``streams[i]`` is the stream of ``sites[i]``; default: the current stream for all. Streams do not wait
            for each other. Sites with the same name must have the same stream.
        before: called before each call, with the call's number.
    """
    chance, order = random.Random(rank), random.Random(0)
    wrong = _counters(sites)
    streams = streams or [torch.cuda.current_stream()] * len(sites)
    torch.cuda.synchronize()
    for i in range(calls):
        before(i)
        drawn = order.randrange(len(sites))
        with torch.cuda.stream(streams[drawn]):
            _late_call(sites[drawn], wrong, chance)
    torch.cuda.synchronize()
    return {name: int(count) for name, count in wrong.items()}


def late_calls(sites: Sequence[Repeated], calls: int, rank: int) -> dict[str, int]:
    """Call sites in turn, with random delays on each rank. Every 37th call runs on another stream, in order with the
    current stream. Returns the number of wrong results by name."""
    chance = random.Random(rank)
    wrong = _counters(sites)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(calls):
        stream = streams[i % 37 == 0]
        stream.wait_stream(streams[0])
        with torch.cuda.stream(stream):
            _late_call(sites[i % len(sites)], wrong, chance)
        streams[0].wait_stream(stream)
    torch.cuda.synchronize()
    return {name: int(count) for name, count in wrong.items()}


def replays(sites: Sequence[Repeated], count: int, others: Sequence[Repeated] = ()) -> dict[str, int]:
    """Capture two CUDA graphs and replay them in turn, mixed with eager calls of ``sites``. The first graph calls
    ``sites``. The second calls ``others``, or ``sites`` if ``others`` is empty. Returns
    ``{"wrong": the number of wrong results}``."""
    captured = []
    torch.cuda.synchronize()
    dist.barrier()
    for held in (sites, others or sites):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call() for _, call, _ in held]
        captured.append((graph, outputs, held))
    wrong = torch.zeros(1, dtype=torch.int64, device=sites[0][2].device)
    for i in range(count):
        graph, outputs, held = captured[i % 2]
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        for output, (*_, first) in zip(outputs, held, strict=True):
            wrong += (output != first).any()
        if i % 5 == 0:
            for _, call, first in sites:
                wrong += (call() != first).any()
    torch.cuda.synchronize()
    return {"wrong": int(wrong)}


def host_us(call: Callable[[], Any], calls: int = 20) -> float:
    """Host time of one call in microseconds, while the GPU is busy: the median over all calls of ``ROUNDS`` rounds.

    The rounds are short, because a full queue would block the host. A round's first call is slow (200 us), because the
    host was idle. The few slow calls hardly change the median.
    """
    took = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        before = time.perf_counter()
        for _ in range(calls):
            call()
            now = time.perf_counter()
            took.append(now - before)
            before = now
        torch.cuda.synchronize()
    return round(statistics.median(took) * 1e6, 1)

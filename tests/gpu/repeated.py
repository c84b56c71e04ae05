# SPDX-License-Identifier: Apache-2.0
"""Repeats calls of sites for the GPU checks of every schedule: late calls, random orders, replays of CUDA graphs, and
the host's time for a call."""

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
"""``(name, call, its first result)``: every later result must be bit for bit the first one."""


def _counters(sites: Sequence[Repeated]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1, dtype=torch.int64, device=first.device) for name, _, first in sites}


def _late_call(site: Repeated, wrong: dict[str, torch.Tensor], chance: random.Random) -> None:
    """One call, this rank late at random; compared on the GPU."""
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
    """Call sites in a random order, the same on all ranks, each rank late at random; returns the number of wrong
    results by name.

    In a random order, what a call wrongly reads of an earlier call comes mostly from other inputs, and shows.

    Args:
        streams: ``streams[i]`` is that of ``sites[i]``, the current one for all without; none is joined with another. A
            name's sites have one stream.
        before: what else happens before each call, given its number.
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
    """Sites in turn, each rank late at random, now and then on another stream, as when two parts of a program run side
    by side: wrong results by name."""
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
    """Two captured graphs of all sites alive, the second one of ``others`` where there are any, replayed in turn and
    mixed with eager calls of the first one's: the number of wrong results."""
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
    """Microseconds of the host for one call, beside the queue of a GPU that is busy: the median of ``ROUNDS`` rounds of
    ``calls``. The rounds are short, since a full queue would stop the host. The median leaves out a round's first call,
    which wakes the host and takes 200 us."""
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

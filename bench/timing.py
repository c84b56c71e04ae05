# SPDX-License-Identifier: Apache-2.0
"""Times several calls in turn, on all ranks together, in microseconds of device time and of host time.

With the host *hidden*, the host launches a call while the device sleeps, so only device time counts.

With the host *in the loop*, a sample is several calls in a row without a sleep. A call then takes its device time or
its host time, whichever is longer. All samples have the same number of calls. This number is chosen so that a sample of
the fastest call takes about ``LOOP_MS``, but it stays within ``CALLS_IN_LOOP``. A result is freed before the next call.
So the next call gets the same addresses, as in the steps of a compiled model.

On a CPU, both times are wall-clock time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CYCLES_A_MS = 2_000_000
"""Cycles of a device sleep that last about 1 ms."""
SLEEP_MS = 3.0
"""Device sleep before a call whose host time is not known yet."""
LEAST_SLEEP_MS = 1.0
"""Shortest device sleep before a call whose host time is known."""
REST_MS = 50.0
"""Pause of the host before a sample with the host in the loop, so that the GPU cools.

On 2 H200s, matmuls of 8192 tokens ran one after the other. After pauses of 10 ms, the clock rate was 1467 MHz. After
pauses of 60 ms, it was 1553 MHz. In single calls with the host hidden, it was 1542 MHz. On 4 H200s, the pause changed
little (bench/results/clocks.jsonl).
"""
LOOP_MS = 8.0
"""Intended length of a sample of the fastest call, with the host in the loop."""
CALLS_IN_LOOP = 4, 40
"""Fewest and most calls in a sample with the host in the loop."""
LEAST_REPEATS = 5
"""If time is short, ``in_turn`` still takes this many samples of a call, but never more than its argument ``most``."""

Call = Callable[[], Any]


def worst(values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value, the same list on all ranks. All ranks call this together. A NaN counts as
    infinity. Otherwise it could get lost in the maximum of some backends, or in Python's ``max``."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor(list(values), device=device, dtype=torch.float64).nan_to_num(math.inf, math.inf, -math.inf)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def greatest(value: float) -> float:
    """The maximum of ``value`` over ranks. All ranks call this together."""
    return worst([value])[0]


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marker = torch.zeros(1, device=device)

    def sample(self, call: Call, calls: int = 1, sleep_ms: float = SLEEP_MS) -> tuple[float, float]:
        """Time ``calls`` calls in a row. All ranks call this together.

        Args:
            sleep_ms: the device's sleep before the first call. With 0, the host pauses for ``REST_MS`` instead, and an
                extra call precedes the timed calls. The extra call is not timed, because the device is idle while the
                host launches it. ``sleep_ms`` is ignored on a CPU.

        Returns:
            ``(device, host)``: mean microseconds of one call. On a CPU, both are the same.
        """
        if self.device.type != "cuda":
            dist.barrier()
            wall = self._host(call, calls)
            return wall, wall
        if sleep_ms:
            torch.cuda._sleep(int(sleep_ms * CYCLES_A_MS))
        else:
            # The pause cools the GPU before every sample, as a device sleep does.
            time.sleep(REST_MS * 1e-3)
            dist.barrier()
            torch.cuda.synchronize()
        # Ranks wait for each other after the sleep: the GPUs' clocks differ, so they wake tens of microseconds apart.
        dist.all_reduce(self.marker)
        if not sleep_ms:
            call()
        start = self.mark()
        host = self._host(call, calls)
        end = self.mark()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / calls, host

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _host(self, call: Call, calls: int) -> float:
        """Mean microseconds of the host for one of ``calls`` calls in a row."""
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    def with_extra_bytes(self, call: Call) -> tuple[Any, float | None]:
        """Make one call, whose result is a tensor. Returns ``(result, extra bytes)``. The extra bytes are the peak
        memory, minus the memory before the call and the result's memory. On a CPU, they are ``None``."""
        if self.device.type != "cuda":
            return call(), None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = call()
        torch.cuda.synchronize()
        return found, float(torch.cuda.max_memory_allocated() - before - found.untyped_storage().nbytes())


def timed(calls: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
    """Samples of each call on this rank's GPU, in microseconds of device time, with the host hidden. The calls take
    turns for ``repeats`` rounds. All ranks call this together."""
    clock = Clock(torch.device("cuda", torch.cuda.current_device()))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(clock.sample(call)[0])
    return samples


@dataclass(frozen=True)
class Timing:
    """Times of a call in microseconds, each the maximum over ranks, and the number of samples.

    Attributes:
        median, p20, p80: median, 20th and 80th percentile of the device time.
        host: median of the host time.
        repeats: samples on each rank.
        fastest: the shortest device time, which other programs on the machine disturb least.
    """

    median: float
    p20: float
    p80: float
    host: float
    repeats: int
    fastest: float = math.nan


def in_turn(clock: Clock, calls: Mapping[str, Call], hidden: bool, most: int, seconds: float) -> dict[str, Timing]:
    """Take one sample of each call in each round, in a new random order. All ranks call this together.

    Args:
        hidden: whether the host is hidden. If not, it is in the loop.
        most: the largest number of rounds; must be at least 2.
        seconds: time for the rounds. At least ``min(most, LEAST_REPEATS)`` rounds run.
    """
    number = 1 if hidden else CALLS_IN_LOOP[0]
    # The first two samples of each call are not counted. The first loads kernels and allocates memory, the second shows
    # how long a call takes.
    for call in calls.values():
        clock.sample(call, number, SLEEP_MS if hidden else 0.0)
    begin = time.perf_counter()
    first = [clock.sample(call, number, SLEEP_MS if hidden else 0.0) for call in calls.values()]
    round_seconds, *measured = worst([time.perf_counter() - begin, *(us for pair in first for us in pair)])
    sleeps = [max(LEAST_SLEEP_MS, 3e-3 * host) if hidden else 0.0 for host in measured[1::2]]
    if not hidden:
        more = min(CALLS_IN_LOOP[1], max(number, math.ceil(LOOP_MS * 1e3 / min(measured[::2]))))
        rest = len(calls) * REST_MS * 1e-3 if clock.device.type == "cuda" else 0.0
        round_seconds, number = rest + (round_seconds - rest) * more / number, more
    repeats = min(most, max(LEAST_REPEATS, int(seconds / round_seconds)))
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    order, chance = list(zip(samples, calls.values(), sleeps)), random.Random(0)
    for _ in range(repeats):
        # A call is faster if the call before it did not heat the GPU. So each round has a new order, equal on all
        # ranks.
        chance.shuffle(order)
        for mine, call, sleep in order:
            mine.append(clock.sample(call, number, sleep))
    numbers: list[float] = []
    for mine in samples:
        quantiles = statistics.quantiles([us for us, _ in mine], n=5)
        numbers += [
            statistics.median(us for us, _ in mine),
            quantiles[0],
            quantiles[-1],
            statistics.median(host for _, host in mine),
            min(us for us, _ in mine),
        ]
    numbers = worst(numbers)
    return {name: Timing(*numbers[5 * i : 5 * i + 4], repeats, numbers[5 * i + 4]) for i, name in enumerate(calls)}

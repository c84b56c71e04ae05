# SPDX-License-Identifier: Apache-2.0
"""Times calls on all ranks in turn: microseconds of the device, and of the host that launches them.

With the host *hidden* a device sleep before each call lets the host run ahead. With the host *in the loop* calls follow
each other without one, as many as take the fastest of them ``LOOP_MS``, behind one that is not counted, since the GPU
that it is launched to has nothing else to do: a call takes what device or host needs for it, whichever is longer. (They
find their tensors where the call before had them, as the layers of a compiled model do step after step.) On a CPU both
are wall-clock time.
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
SLEEP_MS = 3.0
"""As long as nothing is known of the host's time."""
LEAST_SLEEP_MS = 1.0
REST_MS = 50.0
"""Behind 10 ms a matmul in a row ran at 1467 MHz on an H200, behind 60 at 1553, as with the host hidden
(``bench.clocks``)."""
LOOP_MS = 8.0
CALLS_IN_LOOP = 4, 40
"""At least and at most."""
LEAST_REPEATS = 5

Call = Callable[[], Any]


def worst(values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value. All ranks get the same values and may decide by them."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor(list(values), device=device, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def greatest(value: float) -> float:
    """The maximum over ranks."""
    return worst([value])[0]


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marker = torch.zeros(1, device=device)

    def sample(self, call: Call, calls: int = 1, sleep_ms: float = SLEEP_MS) -> tuple[float, float]:
        """Microseconds ``(of the device, of the host)`` of one of ``calls`` calls in a row, behind a sleep of the
        device or (0) behind one more call."""
        if self.device.type != "cuda":
            dist.barrier()
            wall = self._host(call, calls)
            return wall, wall
        if sleep_ms:
            torch.cuda._sleep(int(sleep_ms * CYCLES_A_MS))
        else:
            # Rest, so that every sample begins with a cool GPU, as after a device sleep.
            time.sleep(REST_MS * 1e-3)
            dist.barrier()
            torch.cuda.synchronize()
        # After the sleep, because clocks differ: GPUs that sleep equally long wake tens of microseconds apart.
        dist.all_reduce(self.marker)
        if not sleep_ms:
            call()
        start = self.mark()
        host = self._host(call, calls)
        end = self.mark()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / calls, host

    def mark(self) -> torch.cuda.Event:
        """Mark the begin or the end of a sample."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _host(self, call: Call, calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    def with_extra_bytes(self, call: Call) -> tuple[Any, float | None]:
        """A call's result and its extra bytes: the most memory in use during the call, without what was in use before
        and the result. None if the device cannot tell."""
        if self.device.type != "cuda":
            return call(), None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = call()
        torch.cuda.synchronize()
        return found, float(torch.cuda.max_memory_allocated() - before - found.untyped_storage().nbytes())


def timed(calls: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each call on this rank's GPU, without the host's time; calls take turns, round after round."""
    clock = Clock(torch.device("cuda", torch.cuda.current_device()))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(clock.sample(call)[0])
    return samples


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: median, 20th and 80th percentile, the host's median; of each the maximum over ranks.
    ``repeats``: samples a rank."""

    median: float
    p20: float
    p80: float
    host: float
    repeats: int


def in_turn(clock: Clock, calls: Mapping[str, Call], hidden: bool, most: int, seconds: float) -> dict[str, Timing]:
    """Each call's timing, round after round, in an order that is drawn anew for each: ``most`` rounds (two or more),
    fewer where they would take longer than ``seconds``, but five. All ranks together."""
    number = 1 if hidden else CALLS_IN_LOOP[0]
    # These are not counted: the first one loads, allocates and prepares, the second one tells how long a call takes.
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
        # A call is faster after one that left the GPU cool. All ranks draw the same order.
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
        ]
    numbers = worst(numbers)
    return {name: Timing(*numbers[4 * i : 4 * i + 4], repeats) for i, name in enumerate(calls)}

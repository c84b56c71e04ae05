# SPDX-License-Identifier: Apache-2.0
"""Measures rates of this CPU that the estimates of schedule ``ring`` need (``overlap_inductor.facts.machine``).

Cores that are all busy are slower than a core that is busy alone: 10 to 20 % on a machine of two cores. Ranks keep all
their cores busy, so all these cores are timed at the same time.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

PIECES, ROWS = 16, 64
"""``packing_rate`` cuts a matmul into this many pieces, of this many rows each."""


def of_a_rank(measure: Callable[[], float], ranks: int, cores: int) -> float:
    """What ``measure`` returns on a core, for a rank, with two digits. ``ranks`` ranks share ``cores`` cores."""
    busy = min(ranks, cores)
    return float(f"{at_once(measure, busy) * busy / ranks:.1e}")


def at_once(measure: Callable[[], float], threads: int) -> float:
    """The mean of what ``measure`` returns on ``threads`` threads that call it at the same time. On each of them, torch
    computes with one thread."""

    def on_one_core() -> float:
        torch.set_num_threads(1)
        return measure()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            found = [pool.submit(on_one_core) for _ in range(threads)]
            return statistics.mean(one.result() for one in found)
    finally:
        torch.set_num_threads(before)


def matmul_rate(repeats: int = 25) -> float:
    """FLOP/s of fp32 matmuls on this thread. The median of several times counts."""
    x = torch.randn(1024, 1024)
    return 2 * 1024**3 / statistics.median(timeit.repeat(lambda: x @ x, number=1, repeat=repeats))


def packing_rate(repeats: int = 25) -> float:
    """``Machine.packing_bytes``: B/s at which this thread reads the right operand of an fp32 matmul again for each
    piece after the first. The whole matmul and its pieces take turns, and the median difference of their times
    counts."""
    x, weight = torch.randn(PIECES * ROWS, 2048), torch.randn(1408, 2048)
    out = torch.empty(len(x), len(weight))

    def seconds(pieces: int) -> float:
        cut = list(zip(x.chunk(pieces), out.chunk(pieces), strict=True))
        return timeit.timeit(lambda: [torch.mm(left, weight.t(), out=to) for left, to in cut], number=1)

    def added_seconds() -> float:
        whole = seconds(1)
        return seconds(PIECES) - whole

    added = statistics.median(added_seconds() for _ in range(repeats))
    # Where pieces cost nothing, any large rate says so.
    return weight.nbytes * (PIECES - 1) / max(added, 1e-6)


TOLD = (matmul_rate, packing_rate)
"""What ``bench.layers`` measures and tells the pass."""

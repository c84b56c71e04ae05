# SPDX-License-Identifier: Apache-2.0
"""Measures rates of this CPU that the estimates of schedule ``ring`` need (``overlap_inductor.facts.machine``).

The matmuls are those of a rank in ``bench.layers``: 1024 tokens, and weights that were not used just before. All cores
that the ranks use measure at once, because cores that are all busy are slower than one that is busy alone. CPU time
counts, which does not include the turns of other programs.
"""

from __future__ import annotations

import itertools
import statistics
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

TOKENS, INNER, OUTER = 1024, 2048, 1408
"""A matmul has M = ``TOKENS``, K = ``INNER`` and N = ``OUTER``."""
WEIGHTS = 6
"""Matmuls take turns with this many weights, so that no weight stays in the cache."""
PIECES = 16
"""``packing_rate`` cuts the tokens into this many pieces."""


def of_a_rank(measure: Callable[[], float], ranks: int, cores: int) -> float:
    """The rate of each of ``ranks`` ranks that share ``cores`` cores, with two digits. ``measure`` returns the rate of
    a core."""
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


def _seconds_of_pieces() -> Callable[[int], float]:
    """A function of a number of pieces. It returns the CPU seconds of a matmul that is cut into so many pieces."""
    x, out = torch.randn(TOKENS, INNER), torch.empty(TOKENS, OUTER)
    weights = itertools.cycle([torch.randn(OUTER, INNER) for _ in range(WEIGHTS)])

    def seconds(pieces: int) -> float:
        cut, weight = list(zip(x.chunk(pieces), out.chunk(pieces), strict=True)), next(weights).t()

        def multiply() -> None:
            for left, to in cut:
                torch.mm(left, weight, out=to)

        return timeit.timeit(multiply, number=1, timer=time.thread_time)

    return seconds


def matmul_rate(repeats: int = 25) -> float:
    """FLOP/s of fp32 matmuls on a core. The median of several times counts."""
    seconds = _seconds_of_pieces()
    return 2 * TOKENS * INNER * OUTER / statistics.median(seconds(1) for _ in range(repeats))


def packing_rate(repeats: int = 25) -> float:
    """``Machine.packing_bytes``: B/s at which a core reads the right operand of an fp32 matmul again for each piece
    after the first. The whole matmul and its pieces take turns, and the median difference of their times counts."""
    seconds = _seconds_of_pieces()

    def added_seconds() -> float:
        whole = seconds(1)
        return seconds(PIECES) - whole

    added = statistics.median(added_seconds() for _ in range(repeats))
    # Where pieces cost nothing, any large rate says so.
    return 4 * INNER * OUTER * (PIECES - 1) / max(added, 1e-6)


TOLD = (matmul_rate, packing_rate)
"""What ``bench.layers`` measures and tells the pass."""

# SPDX-License-Identifier: Apache-2.0
"""The rates of a CPU that ``bench.layers`` measures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import cpu_rates


def test_the_rate_of_matmuls_is_that_of_a_cpu() -> None:
    assert 1e8 < cpu_rates.at_once(lambda: cpu_rates.matmul_rate(3), 2) < 1e13


def test_the_rate_of_repeated_reads_is_that_of_the_pieces_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight has 1408 x 2048 elements of 4 bytes. Its 16 pieces take 0.1, 0.5 and 0.3 s longer than the whole
    matmul."""
    calls = iter([0.1, 0.2, 0.2, 0.7, 0.4, 0.7])

    def timed(multiply: Callable[[], Any], number: int, timer: object) -> float:
        assert timer is time.thread_time
        multiply()
        return next(calls)

    monkeypatch.setattr(cpu_rates.timeit, "timeit", timed)
    assert cpu_rates.packing_rate(repeats=3) == pytest.approx(1408 * 2048 * 4 * 15 / 0.3)
    assert next(calls, None) is None


def test_all_threads_are_timed_at_the_same_time() -> None:
    together, before = threading.Barrier(3, timeout=60), torch.get_num_threads()

    def measure() -> float:
        assert torch.get_num_threads() == 1
        return float(1 + together.wait())

    assert cpu_rates.at_once(measure, 3) == 2.0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("ranks", "rate"), [(1, 8.1), (2, 8.1), (4, 4.1)])
def test_ranks_share_the_rate_of_the_cores(ranks: int, rate: float) -> None:
    assert cpu_rates.of_a_rank(lambda: 8.12, ranks, 2) == rate

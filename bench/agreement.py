# SPDX-License-Identifier: Apache-2.0
"""Measure the host time that a comparison of plans adds to each call, once the ranks agree.

    torchrun --nproc-per-node 8 -m bench.agreement [--out bench/results/agreement.jsonl]

Ranks are gloo processes without other work, except in ``uneven``. Each run gives the mean time of one call, in
microseconds. A figure is the median over runs, then the maximum over ranks::

    own        a rank's own time, if all other ranks have already published their plans for the call, so that the rank
               waits for none (9 runs of 63 calls)
    together   the time from call to call, if all ranks call at once and each waits for the slowest (9 runs of 2000
               calls)
    uneven     like together, but each rank works for a random 100 to 1500 us before each call; the longest work of any
               rank is subtracted (9 runs of 300 calls)
    store      like together, but the ranks share no memory and compare through the group's store (3 runs of 200 calls)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.rows import environment
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.runtime.agreement import Comparison
from overlap_inductor.runtime.call_page import CALLS
from overlap_inductor.runtime.call_state import state_of

TURNS, TIMES = 2000, 9
UNEVEN_TURNS, WORK = 300, (100e-6, 1500e-6)
"""Calls of a run with uneven work, and the least and most seconds of a rank's work before a call."""
STORE_TURNS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="rows are appended here")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    plan = ExchangePlan(
        "bench", "on", ("g0: all_reduce float32 [4] in matmul_all_reduce by ring",), True, groups=((group.group_name,),)
    )
    comparison = Comparison(plan, [group], every_call=False)
    if not (comparison.call().overlapped and comparison.call().overlapped and comparison.tied):
        raise SystemExit("the ranks share no memory: start them on one machine")
    state, page = state_of(group), state_of(group).page
    assert page is not None and comparison.settled is not None
    constant, collectives = comparison.settled[0][1:]

    def call() -> None:
        if not comparison.count() and not comparison.call().overlapped:
            raise SystemExit("the ranks differ")

    def ahead() -> None:
        """Publish this rank's plan for its next calls, and wait until all other ranks have done the same."""
        for number in range(1, CALLS // 2):
            passed = number * collectives
            page.publish(state.calls + number, f"{constant}:{state.passed + passed}:{state.place + passed}")
        dist.barrier()

    found = {"own": _own(call, ahead), "together": _microseconds(call, TURNS, TIMES), "uneven": _uneven(call)}
    state.page, state.tied = None, set()
    through_store = dataclasses.replace(plan, version="bench, through the store")
    slow = Comparison(through_store, [group], every_call=True)
    state.agreed.add(through_store.digest)
    found["store"] = _microseconds(lambda: _check(slow), STORE_TURNS, 3)
    tensor = torch.tensor(list(found.values()))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        figures = dict(zip(found, (round(v, 2) for v in tensor.tolist()), strict=True))
        row = {"bench": "agreement", "ranks": dist.get_world_size(), **figures, **environment(torch.device("cpu"))}
        print(json.dumps(row))
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _check(comparison: Comparison) -> None:
    if not comparison.call().overlapped:
        raise SystemExit("the ranks differ")


def _own(call: Callable[[], None], ahead: Callable[[], None]) -> float:
    times = []
    for _ in range(TIMES):
        ahead()
        times.append(_microseconds(call, CALLS // 2 - 1, 1))
        dist.barrier()
    return statistics.median(times)


def _uneven(call: Callable[[], None]) -> float:
    """See ``uneven`` in the module's docstring. All ranks draw the work of every rank from one
    seed, so each rank can subtract the longest work."""
    chance, rank, size = random.Random(0), dist.get_rank(), dist.get_world_size()
    found = []
    for _ in range(TIMES):
        work = [[chance.uniform(*WORK) for _ in range(size)] for _ in range(UNEVEN_TURNS)]
        dist.barrier()
        begun = time.perf_counter()
        for seconds in work:
            end = time.perf_counter() + seconds[rank]
            while time.perf_counter() < end:
                pass
            call()
        found.append((time.perf_counter() - begun - sum(map(max, work))) / UNEVEN_TURNS * 1e6)
    return statistics.median(found)


def _microseconds(call: Callable[[], None], turns: int, times: int) -> float:
    found = []
    for _ in range(times):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(turns):
            call()
        found.append((time.perf_counter() - begun) / turns * 1e6)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Checks the order of calls on GPUs. Prints one JSON row for each scenario and schedule.

    torchrun --nproc-per-node 2 -m tests.gpu.check_order [--rounds 30] [--ranks-share-gpus]

For each input, the first result is compared with fp64. Later results must be bitwise equal to the first. The exit
status is 1 in these cases:

- a result was wrong, or a wait timed out;
- a capture that must be refused was accepted, or its error does not name ``torch.cuda.CUDAGraph``;
- a rank did not get the expected reason why a workspace of 1 TiB is refused.

With ``--ranks-share-gpus``, two ranks can share one GPU. They take turns on it, so a call takes tens of milliseconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.support.gpu_ranks import device
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.runtime.driver import Graph
from overlap_inductor.runtime.driver import own_stream
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.workspace import prepare
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat import symmetric
from tests.gpu import stress_sites
from tests.gpu import stress_variants
from tests.gpu.repeated import Repeated
from tests.gpu.signal_kernels import give
from tests.gpu.signal_kernels import wait_for

ROW_SECONDS = 60.0
PATIENCE_NS = 15_000_000_000
"""Timeout of the receive that rank 0 queues (``queued_behind``). It is shorter than a row's time limit, so a receive
that times out is reported."""
CHOSEN = (("fused", "sm_push"), ("chunked", "copy_engine"), ("small_message", "one_shot"))
"""``(schedule, way)``, as in ``stress_variants.Variant``. The way says how the schedule runs, for example its
transport. The schedule's first pattern with this way is checked."""


class Place:
    """What the scenarios share: two streams, a flag between ranks 0 and 1, and three sites of one variant. The sites
    have two parts (slots) of the workspace. The first and the third site share a slot."""

    def __init__(self, variant: stress_variants.Variant, rank: int) -> None:
        self.rank = rank
        made = stress_sites.sites(variant, dist.group.WORLD, ("a", "b", "c"), stress_sites.SHAPES[:1])
        self.sites = [stress_sites.first_results(calls) for calls in made]
        worst = max(
            stress_sites.off(first, call) / call.tolerance
            for calls, known in zip(made, self.sites, strict=True)
            for call, (*_, first) in zip(calls, known, strict=True)
        )
        assert worst < 1, f"{variant} has {worst:.3g} times the allowed error"
        self.first, self.second = own_stream(device()), own_stream(device())
        self.flag = symmetric.allocate(1, torch.int32, device(), dist.group.WORLD)
        self.faults = FaultRecord.of("check_order", range(dist.get_world_size()), device())
        self.chance, self.counts = random.Random(rank), list[torch.Tensor]()
        # Load every kernel before any kernel waits: a load waits until the device is idle.
        wait_for[(1,)](self.flag.local, 0, self.faults.stop, PATIENCE_NS, num_warps=1)
        give[(1,)](self.flag.local, 0, num_warps=1)
        torch.cuda.synchronize()
        dist.barrier()

    def call(self, site: Repeated, stream: torch.cuda.Stream, late: bool = True) -> None:
        _, run, first = site
        with torch.cuda.stream(stream):
            if late and self.chance.random() < 0.5:
                torch.cuda._sleep(self.chance.randrange(2_000_000))
            # Each call has its own count, because two streams must not add to one count.
            self.counts.append((run() != first).any())

    def begin(self) -> None:
        self.counts.clear()
        torch.cuda.synchronize()
        dist.barrier()

    def end(self) -> int:
        torch.cuda.synchronize()
        dist.barrier()
        workspace_of(dist.group.WORLD, device()).faults.check()
        return sum(int(count) for count in self.counts)


def queued_behind(place: Place, rounds: int) -> int:
    """Rank 0 queues a receive between two calls, on the first call's stream. Rank 1 sends after the second call, which
    runs on another stream. So the second call must not wait for the receive."""
    (a, *_), (b, *_) = place.sites[:2]
    place.begin()
    for i in range(1, rounds + 1):
        place.call(a, place.first)
        if place.rank == 0:
            with torch.cuda.stream(place.first):
                wait_for[(1,)](place.flag.local, i, place.faults.stop, PATIENCE_NS, num_warps=1)
        place.call(b, place.second)
        if place.rank == 1:
            place.first.wait_stream(place.second)
            with torch.cuda.stream(place.first):
                give[(1,)](place.flag.peers[0], i, num_warps=1)
    return place.end() + int(place.faults.error() is not None)


def beside_graphs(place: Place, rounds: int) -> int:
    """One stream replays a graph of one site, while another stream calls a site in the same slot."""
    (_, run, first), others = place.sites[0][0], place.sites[2]
    place.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
        wrong = (output != first).any()
    for i in range(rounds):
        place.call(others[i % len(others)], place.first)
        with torch.cuda.stream(place.second):
            if place.chance.random() < 0.5:
                torch.cuda._sleep(place.chance.randrange(2_000_000))
            output.fill_(float("nan"))
            graph.replay()
            place.counts.append(wrong.clone())
    return place.end()


def two_threads(place: Place, rounds: int) -> int:
    """Two host threads make the same call, each on its own stream. Different calls would need one order on all
    ranks."""
    place.begin()
    gpu, failed = device(), []

    def calls(stream: torch.cuda.Stream) -> None:
        torch.cuda.set_device(gpu)
        try:
            for _ in range(rounds):
                place.call(place.sites[0][0], stream, late=False)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(stream,)) for stream in (place.first, place.second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return place.end()


def refused(place: Place, rounds: int) -> int:
    """A capture by the driver's own functions must be refused. The error must name ``torch.cuda.CUDAGraph``."""
    place.begin()
    stream = own_stream(device())
    try:
        with torch.cuda.stream(stream):
            Graph(place.sites[0][0][1], stream.cuda_stream)
    except UnsupportedError as error:
        return place.end() + int("torch.cuda.CUDAGraph" not in str(error))
    return 1


def too_much(place: Place, rounds: int) -> int:
    """Request a workspace of 1 TiB. Every rank must get the same reason for the refusal. Later calls must run in the
    existing workspace."""
    place.begin()
    reason = prepare(dist.group.WORLD, device(), json.dumps([["too much", 2**40, 1]]), 2**42)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    place.call(place.sites[0][0], place.first)
    expected = f"rank 0 cannot allocate {2**40} bytes of symmetric memory"
    return place.end() + int({reason} != {*reasons} or not (reason or "").startswith(expected))


SCENARIOS: tuple[Callable[[Place, int], int], ...] = (queued_behind, beside_graphs, two_threads, refused, too_much)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks-share-gpus", action="store_true")
    arguments = parser.parse_args()
    rank, _ = start_rank(ROW_SECONDS * 0.7, arguments.ranks_share_gpus)
    bad = 0
    for schedule, way in CHOSEN:
        variant = next(v for v in stress_variants.variants([schedule]) if v.way == way)
        faulthandler.dump_traceback_later(2 * ROW_SECONDS, exit=True)
        place = Place(variant, rank)
        for scenario in SCENARIOS:
            faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
            start = time.monotonic()
            wrong = scenario(place, arguments.rounds)
            bad += bool(wrong)
            if rank == 0 or wrong:
                row = {
                    "check": scenario.__name__,
                    "schedule": schedule,
                    "way": way,
                    "rank": rank,
                    "rounds": arguments.rounds,
                    "wrong": wrong,
                }
                print(json.dumps({**row, "seconds": round(time.monotonic() - start, 2)}), flush=True)
            faulthandler.cancel_dump_traceback_later()
    finish_rank()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

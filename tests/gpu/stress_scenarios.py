# SPDX-License-Identifier: Apache-2.0
"""The scenarios of ``tests.gpu.check_stress``. Each calls one variant many times, except ``lazy``, which
makes only the first calls.

A variant is a schedule, a pattern and a way to run a site. A scenario returns ``{name: number of wrong results}``. A
name is that of a call, ``collectives`` or, for replayed graphs, ``wrong``. All ranks make the same calls in the same
order. Only delays, foreign GPU work and allocations differ between ranks.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from bench.support import gpu_ranks
from overlap_inductor.runtime.workspace import workspace_of
from tests.gpu import stress_sites
from tests.gpu.repeated import Repeated
from tests.gpu.repeated import drawn_calls
from tests.gpu.repeated import replays
from tests.gpu.stress_sites import INPUTS
from tests.gpu.stress_sites import Call
from tests.gpu.stress_variants import Variant

LATE_SECONDS = 0.5
POISON_EVERY = 20
"""The number of calls between two fillings with NaN."""
GIVE_BACK_EVERY = 12
BESIDE_ELEMENTS = 8 << 20
"""fp32 elements of the collectives beside the sites: 32 MiB."""
FOREIGN_SIZE, FOREIGN_MATMULS, FOREIGN_CYCLES = 8192, 6, 35_000_000
"""Foreign work: the size of its matmuls, their number, and the cycles of a kernel that sleeps for 20 ms."""


def make_groups(rank: int, world_size: int, seconds: float) -> dict[str, dist.ProcessGroup]:
    """This rank's groups. All ranks call this function together. ``world_size`` is even.

    - ``world``, and ``second`` of the same ranks;
    - ``pair``: ranks ``r`` and ``W - 1 - r``;
    - ``row`` and ``column`` of a mesh ``[W / 2, 2]``. On 2 ranks, they are ``world`` and ``second``.
    """
    timeout, everyone = datetime.timedelta(seconds=seconds), range(world_size)

    def mine(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        made = {tuple(part): dist.new_group(list(part), timeout=timeout) for part in parts}
        return next(group for part, group in made.items() if rank in part)

    found = {
        "world": dist.group.WORLD,
        "second": mine([everyone]),
        "pair": mine([(r, world_size - 1 - r) for r in range(world_size // 2)]),
    }
    if world_size == 2:
        return {**found, "row": found["world"], "column": found["second"]}
    return {
        **found,
        "row": mine([everyone[r : r + 2] for r in everyone[::2]]),
        "column": mine([everyone[0::2], everyone[1::2]]),
    }


@dataclass
class Stress:
    """One run's ranks, groups and sites."""

    rank: int
    world_size: int
    groups: dict[str, dist.ProcessGroup]
    shapes: Sequence[stress_sites.Shape] = field(default_factory=lambda: stress_sites.SHAPES)
    _sites: dict[tuple[str, ...], list[list[Repeated]]] = field(default_factory=dict)

    def made(self, variant: Variant, group: str) -> list[list[Call]]:
        """The calls of two sites. Each site has its own part (slot) of the group's workspace."""
        return stress_sites.sites(variant, self.groups[group], ("a", "b"), self.shapes)

    def sites(self, variant: Variant, group: str = "world") -> list[list[Repeated]]:
        """The calls of two sites with their first results."""
        key = variant.schedule, variant.pattern, variant.way, group
        if key not in self._sites:
            made = self.made(variant, group)
            self._sites[key] = [stress_sites.first_results(calls) for calls in made]
            worst = max(
                stress_sites.off(first, call) / call.tolerance
                for calls, known in zip(made, self._sites[key], strict=True)
                for call, (*_, first) in zip(calls, known, strict=True)
            )
            assert worst < 1, f"{variant} in group {group} has {worst:.3g} times the allowed error"
        return self._sites[key]

    def check_faults(self) -> None:
        """Raises ``TransferError`` if a wait timed out."""
        for group in self.groups.values():
            workspace_of(group, gpu_ranks.device()).faults.check()


def lazy(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """The first calls of two sites, while the hosts still load kernels.

    Odd ranks come late. The kernels of even ranks wait for odd ranks, while the hosts of even ranks load more kernels.
    Run this scenario first in a process: later, no kernel is left to load. The kernels must be in the compile cache,
    because compiling takes longer than the delay.
    """
    # First make the workspace, and load the kernels that draw inputs. If this came after the sleep, the hosts of
    # even ranks would wait for odd ranks here, and would launch nothing that waits.
    stress.made(variant, "world")
    torch.cuda.synchronize()
    dist.barrier()
    time.sleep(LATE_SECONDS * (stress.rank % 2))
    stress.sites(variant)
    return {}


def delays(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """One site of one shape, with random delays on each rank."""
    return drawn_calls(stress.sites(variant)[0][:INPUTS], calls, stress.rank)


def poison(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two sites. Every ``POISON_EVERY`` calls, fill their workspace and the memory of coming results with NaN."""
    a, b = stress.sites(variant)
    known = a + b
    like = [first for *_, first in known[::INPUTS]]

    def before(i: int) -> None:
        if i % POISON_EVERY == 0:
            stress_sites.poison(stress.groups["world"], like)

    return drawn_calls(known, calls, stress.rank, before=before)


def two_sites(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two sites of one group, in two slots."""
    a, b = stress.sites(variant)
    return drawn_calls(a + b, calls, stress.rank)


def two_groups(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two sites: one in the group of this rank's row, one in the group of its column."""
    return drawn_calls(stress.sites(variant, "row")[0] + stress.sites(variant, "column")[1], calls, stress.rank)


def two_streams(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two sites, each on a stream of its own."""
    a, b = stress.sites(variant)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    return drawn_calls(a + b, calls, stress.rank, [first] * len(a) + [second] * len(b))


def shapes(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """One site, whose calls have two shapes."""
    return drawn_calls(stress.sites(variant)[1], calls, stress.rank)


def stream(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """All calls run on a stream that is not the default stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return drawn_calls(stress.sites(variant)[0], calls, stress.rank)


def given_back(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two sites. Between calls, each rank returns memory to the GPU and allocates other sizes.

    A tensor may then get an old address in a new allocation. A CUDA graph that copies from the old allocation must not
    be replayed.
    """
    a, b = stress.sites(variant)
    chance, held = random.Random(2000 + stress.rank), []

    def before(i: int) -> None:
        if i % GIVE_BACK_EVERY == 0:
            held.clear()
            torch.cuda.empty_cache()
            held.extend(
                torch.empty(chance.randrange(1, 24) << 20, dtype=torch.uint8, device=gpu_ranks.device())
                for _ in range(chance.randrange(4))
            )

    return drawn_calls(a + b, calls, stress.rank, before=before)


def subgroup(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """One site in the group ``pair``. All pairs run at the same time."""
    return drawn_calls(stress.sites(variant, "pair")[0], calls, stress.rank)


def beside_nccl(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """One site, while large collectives of a second group run on another stream."""
    other, beside = stress.groups["second"], torch.cuda.Stream()
    mine = torch.full((BESIDE_ELEMENTS,), float(stress.rank), device=gpu_ranks.device())
    largest, everyone = mine.clone(), mine.new_empty(stress.world_size * BESIDE_ELEMENTS)
    torch.cuda.synchronize()

    def before(i: int) -> None:
        if i % 100 == 0:
            # The collectives take longer than the calls. Without this wait, their queue would grow.
            torch.cuda.synchronize()
        if i % 4 == 0:
            with torch.cuda.stream(beside):
                if i % 8:
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=other)
                else:
                    dist.all_gather_into_tensor(everyone, mine, group=other)

    wrong = drawn_calls(stress.sites(variant)[0], calls, stress.rank, before=before)
    expected = torch.arange(stress.world_size, dtype=mine.dtype, device=mine.device).repeat_interleave(BESIDE_ELEMENTS)
    reduced = calls <= 4 or bool((largest == stress.world_size - 1).all())
    return {**wrong, "collectives": int(not reduced) + int(not torch.equal(everyone, expected))}


def foreign(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """One site. At random times, matmuls or a sleeping kernel run on the GPU, on a stream of higher priority."""
    chance, theirs = random.Random(1000 + stress.rank), torch.cuda.Stream(priority=-1)
    x = torch.zeros(FOREIGN_SIZE, FOREIGN_SIZE, device=gpu_ranks.device(), dtype=stress_sites.dtype)
    y = torch.empty_like(x)

    def before(i: int) -> None:
        if i % 50 == 0:
            torch.cuda.synchronize()
        if chance.random() < 0.05:
            with torch.cuda.stream(theirs):
                if chance.random() < 0.5:
                    torch.cuda._sleep(FOREIGN_CYCLES)
                else:
                    for _ in range(FOREIGN_MATMULS):
                        torch.mm(x, x, out=y)

    return drawn_calls(stress.sites(variant)[0], calls, stress.rank, before=before)


def determinism(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Equal inputs must give equal bits in another group, which has its own workspace."""
    (a, b), (c, d) = stress.sites(variant), stress.sites(variant, "second")
    same = [(name, run, first) for (*_, first), (name, run, _) in zip(a + b, c + d, strict=True)]
    return drawn_calls(same, calls, stress.rank)


def graphs(stress: Stress, variant: Variant, calls: int) -> dict[str, int]:
    """Two CUDA graphs with different inputs, replayed alternately. Eager calls run between some replays."""
    known = stress.sites(variant)[0]
    return replays(known[::INPUTS], calls, known[1::INPUTS])


Scenario = Callable[[Stress, Variant, int], dict[str, int]]
SCENARIOS: dict[str, tuple[Scenario, int]] = {
    scenario.__name__: (scenario, part)
    for part, scenarios in {
        1: (lazy, delays, poison, graphs),
        5: (two_sites, two_groups, two_streams, shapes, stream, given_back, subgroup, beside_nccl, determinism),
        10: (foreign,),
    }.items()
    for scenario in scenarios
}
"""``{name: (function, divisor of the number of iterations)}``."""


def applies(scenario: str, variant: Variant, share_gpus: bool) -> bool:
    """Whether a scenario applies to a variant.

    NCCL refuses two ranks on one GPU. In ``wave_groups``, NCCL chooses the order of the sums, so bits may differ
    between groups.
    """
    if share_gpus and (scenario == "beside_nccl" or variant.schedule == "wave_groups"):
        return False
    return scenario != "determinism" or variant.schedule != "wave_groups"

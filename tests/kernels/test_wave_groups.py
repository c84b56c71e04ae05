# SPDX-License-Identifier: Apache-2.0
"""Runs schedule ``wave_groups`` on gloo processes, with its kernels in Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap_inductor.lowerings.wave_groups.ops  # noqa: F401
from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.wave_groups import wait_for_group
from overlap_inductor.lowerings.wave_groups import launch as wave_groups
from overlap_inductor.lowerings.wave_groups.parameters import WaveParameters
from overlap_inductor.runtime.group_state import held_by
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import collective_times
from overlap_inductor.transports.nccl import Nccl
from tests.support.fake_group import fake_group
from tests.support.gloo_ranks import run_ranks

SMALL = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "group_m": 2,
    "warps": 4,
    "stages": 1,
    "free": [1],
    "halves": False,
}
CALLS = 2


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls of an op.

    Attributes:
        rows: rows of the left operand. For a scatter: rows of one rank's shard of the result.
        partition: where each group of waves begins and ends, counted in bands. If it is ``None``, the op measures and
            chooses a partition.
        blocks: number of SMs. If there are several, one is left free.
        in_rows: the right operand is row-major, not transposed.
    """

    pattern: str
    rows: int
    columns: int
    inner: int
    partition: list[int] | None = None
    blocks: int = 3
    reduce_op: str = "sum"
    bias: bool = False
    in_rows: bool = False
    halves: bool = False


CASES = {
    "all-reduce, one group": Case("matmul_all_reduce", 32, 32, 32, [0, 2]),
    "all-reduce, a group per band, no multiples of a tile": Case("matmul_all_reduce", 71, 40, 24, [0, 1, 2, 3, 4, 5]),
    "all-reduce, one block, uneven groups, halves": Case(
        "matmul_all_reduce", 128, 64, 48, [0, 1, 3, 8], blocks=1, halves=True
    ),
    "all-reduce, average with bias": Case("matmul_all_reduce", 70, 24, 40, [0, 3, 5], reduce_op="avg", bias=True),
    "all-reduce, measured partition": Case("matmul_all_reduce", 80, 24, 32, bias=True, in_rows=True),
    "scatter, one group": Case("matmul_reduce_scatter", 32, 32, 32, [0, 2]),
    "scatter, a group per band, no multiples of a tile": Case("matmul_reduce_scatter", 23, 40, 24, [0, 1, 2]),
    "scatter, ragged bands in one group": Case(
        "matmul_reduce_scatter", 39, 24, 40, [0, 1, 3], blocks=4, halves=True, in_rows=True
    ),
    "scatter, average with bias": Case("matmul_reduce_scatter", 72, 24, 32, [0, 2, 3, 5], reduce_op="avg", bias=True),
    "scatter, measured partition": Case("matmul_reduce_scatter", 40, 40, 32),
    "no rows": Case("matmul_all_reduce", 0, 16, 16),
}


def _inputs(case: Case, rank: int, world_size: int, call: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + rank + 100 * call)
    sizes: tuple[tuple[int, ...], ...] = (
        (case.rows * (world_size if case.pattern == "matmul_reduce_scatter" else 1), case.inner),
        (case.inner, case.columns),
        (case.columns,),
    )
    a, b, bias = (torch.randn(size, generator=generator).half() for size in sizes)
    return a, b if case.in_rows else b.t().contiguous().t(), bias


def _rank(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Run the cases in one process, where they share the group's counters. Returns the problems on this rank."""
    collective_times.SIZES, collective_times.REPEATS = (2**9, 2**11, 2**13), 1
    group, problems = dist.group.WORLD, []
    for name in names:
        case = CASES[name]
        waves = wave_groups.waves_of(group, torch.device("cpu"))
        waves.place.blocks, waves.place.patience_ns = case.blocks, 20_000_000
        settings = {**SMALL, "halves": case.halves} | ({} if case.partition is None else {"partition": case.partition})
        op = getattr(torch.ops.overlap_inductor, f"wave_groups_{case.pattern}")
        for call in range(CALLS):
            a, b, bias = _inputs(case, rank, world_size, call)
            found, _ = op(
                torch.zeros(1),
                a,
                b,
                bias if case.bias else None,
                json.dumps(settings),
                case.reduce_op,
                group.group_name,
                name,
            )
            exact = torch.zeros(a.shape[0], case.columns, dtype=torch.float64)
            for r in range(world_size):
                a, b, bias = (t.double() for t in _inputs(case, r, world_size, call))
                exact += (a @ b + (bias if case.bias else 0)) / (world_size if case.reduce_op == "avg" else 1)
            if case.pattern == "matmul_reduce_scatter":
                exact = exact.chunk(world_size)[rank]
            if (
                found.dtype != torch.float16
                or found.shape != exact.shape
                or not torch.allclose(found.double(), exact, rtol=4e-2, atol=2e-1)
            ):
                problems.append(
                    f"{name} call {call}: {tuple(found.shape)} off by {(found.double() - exact).abs().max():.3g}"
                )
            if waves.counters.any() or waves.queue.any():
                problems.append(
                    f"{name} call {call}: not zero after the call: {waves.counters.count_nonzero()} counters and queue"
                    f" {waves.queue[:2].tolist()}"
                )
            waves.place.faults.check()
    plans = {str(key): (plan.free, plan.partition) for key, plan in waves.chosen.items()}
    of_all: list[Any] = [None] * world_size
    dist.all_gather_object(of_all, (plans, waves.curves))
    if of_all != of_all[:1] * world_size:
        problems.append(f"the ranks decided differently: {of_all}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, list(CASES)), (3, ["all-reduce, measured partition", "scatter, ragged bands in one group"])],
)
def test_agrees_with_fp64(world_size: int, names: list[str]) -> None:
    for rank, problems in enumerate(run_ranks(world_size, _rank, names, timeout=250)):
        assert not problems, f"rank {rank}: {problems}"


def _own(rank: int, world_size: int) -> list[Any]:
    """Run the sites of ``OWN``. Returns the sites at which this rank measured, and the chosen partitions."""
    collective_times.SIZES, collective_times.REPEATS = (2**9, 2**11), 1
    measured, choose = [], wave_groups.Call._choose

    def counted(self: wave_groups.Call) -> wave_groups.WavePlan:
        measured.append(self.site)
        return choose(self)

    wave_groups.Call._choose = counted  # type: ignore[method-assign]
    group = dist.group.WORLD
    waves = wave_groups.waves_of(group, torch.device("cpu"))
    waves.place.patience_ns = 20_000_000
    for site, inners, biased in OWN:
        inner = inners[rank]
        a, b = torch.full((64, inner), 0.5).half(), torch.ones(16, inner).half().t()
        bias = torch.ones(16).half() if rank == biased else None
        result = wave_groups.matmul_all_reduce(a, b, group, replace(PARAMETERS, partition=None), site, bias)
        assert (result == sum(inners) / 2 + (biased is not None)).all(), site
        assert not waves.counters.any() and not waves.queue.any()
        waves.place.faults.check()
    return [measured, [plan.partition for plan in waves.chosen.values()]]


OWN = [
    ("bias of rank 0", (32, 32), 0),
    ("no bias", (32, 32), None),
    ("bias of rank 1", (32, 32), 1),
    ("inner of rank 1", (32, 48), None),
    ("inner of rank 0", (48, 32), None),
    ("inner of rank 0", (48, 48), None),
    ("inner of rank 0", (32, 48), None),
]
"""``(site, inner size on each rank, the rank that has a bias)``, in the order of the calls."""


def test_ranks_measure_together_if_inner_sizes_and_biases_differ() -> None:
    """A call's sizes may be new to rank 0 only. If rank 0 measured alone, it would wait for peers that already run the
    collective. So all ranks measure together:

    - rank 0's inner size and bias decide whether a site is measured;
    - two sites share one measurement if, on rank 0, their inner sizes are equal, and both or neither have a bias;
    - a site with a plan is not measured again.
    """
    first, second = run_ranks(2, _own, timeout=120)
    assert first == second and first[0] == ["bias of rank 0", "no bias", "inner of rank 0"]


A, B = torch.zeros(64, 32).half(), torch.zeros(16, 32).half().t()
PARAMETERS = WaveParameters(2, (1,), (0, 1, 4), 16, 16, 16, 2, 4, 1, False)


@pytest.fixture
def waves() -> Iterator[wave_groups.GroupWaves]:
    with fake_group(2) as group:
        yield wave_groups.waves_of(group, torch.device("cpu"))


def _call(waves: wave_groups.GroupWaves, parameters: WaveParameters = PARAMETERS) -> torch.Tensor:
    return wave_groups.matmul_all_reduce(A, B, waves.place.group, parameters, "site_7")


def test_tiles_that_never_come(waves: wave_groups.GroupWaves) -> None:
    """The kernel's wait times out. The kernel sets the rows of its group of waves to NaN and ends. The next call raises
    an error."""
    place = waves.place
    waves.counters[2 * FLAG_WORDS] = 3
    c = torch.zeros(64, 16).half()
    wait_for_group[(1,)](
        waves.counters, c, place.faults.stop, 20_000, 2, 5, place.faults.number("site_7"), 0, 160, 320, 256
    )
    assert c.flatten()[160:480].isnan().all() and not c.flatten()[:160].any() and not c.flatten()[480:].any(), (
        "the elements that are NaN are not exactly those of the group"
    )
    with pytest.raises(
        TransferError,
        match="site site_7 of group '0' timed out waiting for tiles of its own matmul: expected 5, saw 3",
    ):
        _call(waves)


def test_a_group_that_lies_across_element_2_to_31_becomes_nan(waves: wave_groups.GroupWaves, tmp_path: Path) -> None:
    place, first = waves.place, 2**31 - 256
    # The memory is a sparse file. Only the pages that are written need space.
    c = torch.from_file(str(tmp_path / "c"), shared=True, size=first + 768, dtype=torch.float16)
    number = place.faults.number("site_7")
    wait_for_group[(1,)](waves.counters, c, place.faults.stop, 20_000, 0, 5, number, 0, first, 512, 256)
    around = c[first - 256 :].isnan()
    assert around.tolist() == [False] * 256 + [True] * 512 + [False] * 256


def test_a_call_raises_after_a_collective_has_failed(
    waves: wave_groups.GroupWaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure leaves counters that no kernel has reset, so a later call's collectives would start too early. The
    later call must raise an error instead."""
    _call(waves)

    def fails(*args: object) -> None:
        raise RuntimeError("no route to a peer")

    monkeypatch.setattr(Nccl, "reduce_rows", fails)
    with pytest.raises(RuntimeError, match="no route to a peer"):
        _call(waves)
    assert waves.counters.any()
    monkeypatch.undo()
    with pytest.raises(TransferError, match="was aborted"):
        _call(waves)


def test_a_call_runs_after_a_capture_that_failed(
    waves: wave_groups.GroupWaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    _call(waves)
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    monkeypatch.setattr(Nccl, "forked", lambda self, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _call(waves)
    monkeypatch.undo()
    _call(waves)


def test_nothing_is_measured_in_a_capture(waves: wave_groups.GroupWaves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    with pytest.raises(
        OverlapError,
        match="site site_7 has no measured partition yet, .* Run the compiled function once before capturing it",
    ):
        _call(waves)
    monkeypatch.setattr(symmetric, "capturing", lambda: False)
    _call(waves)
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    assert _call(waves).shape == (64, 16), "a site that has run once cannot be captured"
    # Another inner size needs another kernel, which would be loaded during the capture.
    a, b = A[:, :16].contiguous(), B[:16].t().contiguous().t()
    with pytest.raises(OverlapError, match="Run the compiled function once before capturing it"):
        wave_groups.matmul_all_reduce(a, b, waves.place.group, PARAMETERS, "site_7")


def test_tables_of_partitions_run_out(waves: wave_groups.GroupWaves) -> None:
    """A table holds one partition in the GPU's memory. The choice of a plan fills one table for the whole matmul, and
    one for each number of free SMs."""
    _call(waves, replace(PARAMETERS, free=(0, 1)))
    assert waves.used == 3
    waves.used = wave_groups.TABLES
    _call(waves, replace(PARAMETERS, free=(0, 1)))
    with pytest.raises(OverlapError, match="filled all 4096 tables of group '0', because a matmul of new sizes fills"):
        _call(waves)


def test_a_group_that_is_destroyed_leaves_no_counters(waves: wave_groups.GroupWaves) -> None:
    destroyed = waves.place.group
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    made = wave_groups.waves_of(dist.group.WORLD, torch.device("cpu"))
    assert made is not waves and made in held_by(dist.group.WORLD).values() and not held_by(destroyed)


def test_unsupported_operands_and_partitions_are_refused(waves: wave_groups.GroupWaves) -> None:
    group = waves.place.group
    with pytest.raises(UnsupportedError, match="63 rows cannot be cut into 2 equal shards"):
        wave_groups.matmul_reduce_scatter(A[:63], B, group, PARAMETERS, "site_7")
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        wave_groups.matmul_all_reduce(A.float(), B.float(), group, PARAMETERS, "site_7")
    with pytest.raises(OverlapError, match="does not cut 4 bands"):
        _call(waves, replace(PARAMETERS, partition=(0, 1, 2)))

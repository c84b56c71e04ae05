# SPDX-License-Identifier: Apache-2.0
"""Schedule ``wave_groups`` runs a matmul on the current stream. A collective for each group of the matmul's waves runs
beside it (FlashOverlap, arXiv 2504.19519).

Planning. All ranks plan a site together at its first call, with the first rank's measurements:

1. Time the matmul with each number of SMs that it may leave free for collectives (``WaveParameters.free``).
2. Measure the collective's curve (seconds by bytes), once for each process group, transport and kind of collective.
3. For each number of free SMs, partition the matmul's bands (``best_partition``), and time the whole call. Keep the
   fastest plan.

Sites share a plan if their calls are alike on the first rank. Alike calls have the same kind of collective, sizes,
dtype, strides of ``b`` and parameters, and either all or none of them have a bias. On another rank, the matmuls of
these sites may differ in inner size or bias. The plan fits these matmuls too, because a partition cuts only rows.

Loading. Loading a kernel waits for the device. If a kernel on the device waits for a matmul that is only launched after
the loading, this is a deadlock. So the first call loads every kernel before any of them waits. A matmul of another
inner size or bias is loaded before any kernel of its call waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.wave_groups import matmul_in_groups
from overlap_inductor.kernels.wave_groups import wait_for_group
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.lowerings.one_op.operands import check_operands
from overlap_inductor.lowerings.wave_groups.parameters import MAX_GROUPS
from overlap_inductor.lowerings.wave_groups.parameters import Curve
from overlap_inductor.lowerings.wave_groups.parameters import WaveParameters
from overlap_inductor.lowerings.wave_groups.parameters import Waves
from overlap_inductor.lowerings.wave_groups.parameters import best_partition
from overlap_inductor.lowerings.wave_groups.parameters import check_partition
from overlap_inductor.lowerings.wave_groups.parameters import predicted
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.runtime.workspace import GroupWorkspace
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import collective_times
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transport import WholeCollectives

TABLE_WORDS = 32
"""int32 words of one partition in the GPU's memory: ``MAX_GROUPS + 1``, padded to 128 bytes."""
TABLES = 4096
"""The largest number of partitions that are stored for one process group on one device."""
POISONED_AT_ONCE = 256
"""Elements that the waiting warp overwrites in one step, after an abort: 16 bytes for each thread."""


@dataclass(frozen=True)
class WavePlan:
    """How a call runs.

    Attributes:
        free: SMs left to the collectives.
        partition: first band of each group, then the number of bands.
        table: the partition as int32 on the device.
        seconds: the predicted seconds of the call; ``None`` if the partition was given.
    """

    free: int
    partition: tuple[int, ...]
    table: torch.Tensor
    seconds: float | None


@dataclass
class GroupWaves:
    """What the calls of one process group share on one device. ``chosen`` and ``first_ranks`` have the same keys on all
    ranks. So a plan that is missing in ``chosen`` is missing there on all ranks, and all ranks make it together.

    Attributes:
        queue, counters: see ``kernels.wave_groups``; zero between calls.
        tables: int32 ``[TABLES, TABLE_WORDS]`` on the device; the first ``used`` are taken.
        curves: measured curves, by transport and by whether the collective is a reduce-scatter.
        chosen: plans, by the sizes that the first rank multiplies.
        first_ranks: ``{facts that all ranks know of a site: key of the site's plan in chosen}``.
        plans: plans, by site and by the sizes that this rank multiplies there.
    """

    place: GroupWorkspace
    queue: torch.Tensor
    counters: torch.Tensor
    tables: torch.Tensor
    used: int = 0
    curves: dict[tuple[str, bool], Curve] = field(default_factory=dict)
    chosen: dict[Hashable, WavePlan] = field(default_factory=dict)
    first_ranks: dict[Hashable, Hashable] = field(default_factory=dict)
    plans: dict[Hashable, WavePlan] = field(default_factory=dict)

    def table(self, partition: tuple[int, ...]) -> torch.Tensor:
        """The next free row of ``tables``, filled with ``partition``. Raises ``OverlapError`` if all rows are taken."""
        if self.used == TABLES:
            raise OverlapError(
                f"schedule wave_groups has filled all {TABLES} tables of group {self.place.group.group_name!r}, because"
                " a matmul of new sizes fills several. Compile for fewer sizes, or set OVERLAP_INDUCTOR_SCHEDULE to"
                " another schedule."
            )
        row = self.tables[self.used]
        row[: len(partition)] = torch.tensor(partition, dtype=torch.int32)
        self.used += 1
        return row

    def curve(self, transport: WholeCollectives, scatters: bool, like: torch.Tensor) -> Curve:
        key = transport.name, scatters
        if key not in self.curves:
            self.curves[key] = Curve(collective_times.measured_curve(transport, scatters, like, self.place.group))
        return self.curves[key]


def waves_of(group: dist.ProcessGroup, device: torch.device) -> GroupWaves:
    """The state that the calls of ``group`` share on ``device``. All ranks of the group make this state together, on
    first use.

    Raises:
        OverlapError: the state would be made while a CUDA graph is captured, or the group was destroyed.
    """
    return _WAVES.of(group, device)


def _made(owner: Owner) -> GroupWaves:
    group, device = owner.group, owner.device
    assert device is not None
    place = workspace_of(group, device)
    _not_in_a_capture(f"group {group.group_name!r}")
    words = symmetric.lasting(
        torch.zeros(FLAG_WORDS * (1 + MAX_GROUPS) + TABLES * TABLE_WORDS, dtype=torch.int32), device
    )
    queue, counters, tables = words.split([FLAG_WORDS, FLAG_WORDS * MAX_GROUPS, TABLES * TABLE_WORDS])
    return GroupWaves(place, queue, counters, tables.view(TABLES, TABLE_WORDS))


_WAVES = Kind("counters of wave groups", _made)


def _not_in_a_capture(what: str) -> None:
    if symmetric.capturing():
        raise OverlapError(
            f"{what} has no measured partition yet, and a CUDA graph is being captured, in which nothing can be"
            " measured. Run the compiled function once before capturing it."
        )


@dataclass(frozen=True)
class Call:
    """One matmul with its collective: ``a [M, K] @ b [K, N] + bias [N]``, reduce-scattered by rows or all-reduced."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scatters: bool
    average: bool
    site: str
    parameters: WaveParameters
    waves: GroupWaves

    @property
    def group(self) -> dist.ProcessGroup:
        return self.waves.place.group

    @property
    def transport(self) -> WholeCollectives:
        return transport_named(WholeCollectives, self.parameters.transport)

    @property
    def shards(self) -> int:
        """Shards of the result: one for each rank (reduce-scatter), or one (all-reduce)."""
        return self.group.size() if self.scatters else 1

    @property
    def rows(self) -> int:
        return self.a.shape[0] // self.shards

    @property
    def bands(self) -> int:
        return -(-self.rows // self.parameters.block_m)

    @property
    def tiles(self) -> int:
        """Tiles of a band in all shards."""
        return self.shards * -(-self.b.shape[1] // self.parameters.block_n)

    def blocks(self, free: int) -> int:
        return max(1, min(self.parameters.blocks - free, self.bands * self.tiles))

    def multiply(self, free: int, table: torch.Tensor, groups: int) -> torch.Tensor:
        """Launch the matmul on the current stream. Returns ``[M, N]``, its rows ordered by groups."""
        p = self.parameters
        inner, columns = self.b.shape
        c = torch.empty(self.a.shape[0], columns, dtype=self.a.dtype, device=self.a.device)
        right, transposed = right_descriptor(self.b, p.block_n, p.block_k)
        matmul_in_groups[(self.blocks(free),)](
            a_desc=TensorDescriptor.from_tensor(self.a, [p.block_m, p.block_k]),
            b_desc=right,
            c_desc=TensorDescriptor.from_tensor(c, [p.block_m, p.block_n // 2 if p.halves else p.block_n]),
            c=c,
            bias=c if self.bias is None else self.bias,
            partition=table,
            counters=self.waves.counters,
            queue=self.waves.queue,
            rows=self.rows,
            columns=columns,
            inner=inner,
            shards=self.shards,
            groups=groups,
            scale=1.0 / self.group.size() if self.average else 1.0,
            BLOCK_M=p.block_m,
            BLOCK_N=p.block_n,
            BLOCK_K=p.block_k,
            GROUP_M=p.group_m,
            BATCH=TILES_A_BATCH,
            THREADS=32 * p.warps,
            HALVES=p.halves,
            TRANSPOSED=transposed,
            BIAS=self.bias is not None,
            num_warps=p.warps,
            num_stages=p.stages,
        )
        return c

    def wait(self, c: torch.Tensor, group: int, first: int, end: int) -> None:
        """Launch the kernel that waits for group ``group``, bands ``first`` to ``end - 1`` of ``c``."""
        place, block_m = self.waves.place, self.parameters.block_m
        number, rank = place.faults.number(self.site), self.group.rank()
        top, bottom = (min(band * block_m, self.rows) * self.shards * c.shape[1] for band in (first, end))
        wait_for_group[(1,)](
            counters=self.waves.counters,
            c=c,
            stop=place.faults.stop,
            patience=place.patience_ns,
            group=group,
            tiles=(end - first) * self.tiles,
            site=number,
            rank=rank,
            first=top,
            elements=bottom - top,
            BLOCK=POISONED_AT_ONCE,
            num_warps=1,
        )

    def alone(self, free: int, table: torch.Tensor) -> None:
        """Run the matmul as one group, without a collective."""
        self.wait(self.multiply(free, table, 1), 0, 0, self.bands)

    def run(self, plan: WavePlan) -> torch.Tensor:
        """Run the call as planned. Returns ``[M / world_size, N]``, or ``[M, N]`` for an all-reduce."""
        device, block_m, captured = self.a.device, self.parameters.block_m, symmetric.capturing()
        transport = self.transport
        try:
            with transport.forked(device) as side:
                c = self.multiply(plan.free, plan.table, len(plan.partition) - 1)
                result = c.new_empty(self.rows, c.shape[1]) if self.scatters else c
                with side:
                    for group, (first, end) in enumerate(itertools.pairwise(plan.partition)):
                        self.wait(c, group, first, end)
                        top, bottom = first * block_m, min(end * block_m, self.rows)
                        piece = c[top * self.shards : bottom * self.shards]
                        transport.reduce_rows(result[top:bottom] if self.scatters else piece, piece, self.group)
        except BaseException:
            # A counter that no kernel waited for stays set, and a later call's collective would start too early. (A
            # capture runs nothing.)
            if not captured:
                self.waves.place.faults.abort()
            raise
        return result

    def plan(self) -> WavePlan:
        """How this call runs. All ranks decide it together at the first call of its sizes.

        Raises:
            OverlapError: the plan would be made while a CUDA graph is captured, the given partition does not fit, or
                all rows of ``GroupWaves.tables`` are taken.
        """
        agreed = (self.site, self.scatters, self.a.shape[0], self.b.shape[1], self.a.dtype, self.parameters)
        own = (self.b.shape[0], *self.b.stride(), self.bias is None)
        known = self.waves.plans.get((agreed, own))
        if known is None:
            # A capture is refused even if the ranks have decided already. A kernel for another inner size or bias may
            # still have to be loaded, and loading waits for the device.
            _not_in_a_capture(f"site {self.site}")
            known = self.waves.plans[agreed, own] = self._agreed_plan(agreed, own)
        return known

    def _agreed_plan(self, agreed: tuple[Hashable, ...], own: tuple[int, ...]) -> WavePlan:
        """The plan of all ranks for a call. ``agreed`` is equal on all ranks; ``own`` may differ."""
        waves = self.waves
        known = waves.first_ranks.get(agreed)
        if known is None:
            first = collective_times.of_first_rank([float(number) for number in own], self.group, self.a.device)
            # The key has no site, so one measurement serves all sites of the same sizes.
            known = (*agreed[1:], *first)
            if known not in waves.chosen:
                waves.chosen[known] = self._choose()
            waves.first_ranks[agreed] = known
        return waves.chosen[known]

    def _choose(self) -> WavePlan:
        p = self.parameters
        if p.partition is not None:
            check_partition(p.partition, self.bands)
        whole = self.waves.table((0, self.bands))
        # The largest number of free SMs comes first, because the matmul then takes the longest.
        free = sorted(p.free, reverse=True)
        seconds = self.first_rank_seconds([functools.partial(self.alone, f, whole) for f in free])
        plans = []
        for f, matmul in zip(free, seconds):
            partition, expected = p.partition, None
            if partition is None:
                waves, curve = self.as_waves(f, matmul), self.waves.curve(self.transport, self.scatters, self.a)
                partition = best_partition(waves, curve)
                expected = predicted(partition, waves, curve)
            plans.append(WavePlan(f, partition, self.waves.table(partition), expected))
        seconds = self.first_rank_seconds([functools.partial(self.run, plan) for plan in plans])
        return plans[seconds.index(min(seconds))]

    def first_rank_seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of each call on the group's first rank. ``calls``: the longest first. All ranks do this together."""
        seconds = collective_times.seconds_of(calls, self.a.device)
        return collective_times.of_first_rank(seconds, self.group, self.a.device)

    def as_waves(self, free: int, matmul_seconds: float) -> Waves:
        """The call as the predictor sees it, if its matmul takes ``matmul_seconds`` and leaves ``free`` SMs free."""
        blocks = self.blocks(free)
        waves = -(-self.bands * self.tiles // blocks)
        row_bytes = self.b.shape[1] * self.a.element_size() * self.shards
        return Waves(
            self.bands, self.tiles, blocks, matmul_seconds / waves, self.rows, self.parameters.block_m, row_bytes
        )


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup,
    parameters: WaveParameters,
    site: str,
    bias: torch.Tensor | None = None,
    average: bool = False,
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows: ``a [world_size * rows, K]``, ``b [K, N]``, ``bias [N]``, fp16 or bf16.
    Returns ``[rows, N]``. ``average``: divide the sum by the number of ranks.

    Raises:
        UnsupportedError: the kernel does not support a dtype, size or layout.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
        OverlapError: see ``waves_of`` and ``Call.plan``.
    """
    return _checked(a, b, group, parameters, site, bias, average, True)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup,
    parameters: WaveParameters,
    site: str,
    bias: torch.Tensor | None = None,
    average: bool = False,
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)`` as ``matmul_reduce_scatter``, but with any number of rows. Returns ``[M, N]``."""
    return _checked(a, b, group, parameters, site, bias, average, False)


def _checked(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup,
    p: WaveParameters,
    site: str,
    bias: torch.Tensor | None,
    average: bool,
    scatters: bool,
) -> torch.Tensor:
    check_operands(a, b, bias)
    if scatters and a.shape[0] % group.size():
        raise UnsupportedError(f"{a.shape[0]} rows cannot be cut into {group.size()} equal shards")
    # Only one thread at a time may run these lines, because they may make shared state or plan a site.
    with call_order(a.device):
        waves = waves_of(group, a.device)
        waves.place.faults.check()
        call = Call(a, b, bias, scatters, average, site, p, waves)
        return call.run(call.plan())

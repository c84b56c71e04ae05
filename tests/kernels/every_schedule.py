# SPDX-License-Identifier: Apache-2.0
"""Calls of every schedule whose kernels wait for peers. Each rank knows the right result without its peers,
from ``Call.right``."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import torch

from overlap_inductor.lowerings.chunked import contracted_launch
from overlap_inductor.lowerings.chunked import exchange_launch
from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked import output_launch
from overlap_inductor.lowerings.chunked import reduce_launch
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused import ops as fused_ops
from overlap_inductor.lowerings.fused.contraction import contracted_all_to_all_matmul
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.table_calls import Lookups
from overlap_inductor.lowerings.fused.table_calls import look_up
from overlap_inductor.lowerings.fused.table_parameters import TableParameters
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.arena import READS
from overlap_inductor.runtime.workspace import Launch
from tests.kernels.ranks import SharedWorkspace
from tests.support.shared_memory import SMALL_TILES

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
ROWS = 16
FUSED = FusedParameters(1, pieces=1, pushers=1, **SMALL_TILES)
CHUNKED = ChunkedParameters(2, "sm_push", 1, grain=8, pushers=2)


@dataclass(frozen=True)
class Call:
    """A call of a schedule.

    Attributes:
        run: ``run(launch, value)`` computes operands from ``value`` and makes the call. All ranks pass the same
            ``value``. Every element of the result is ``right(value, world_size)``.
        gathers: whether ``right`` does not depend on the number of ranks, as for a gather or an all-to-all.
    """

    run: Callable[[Launch, float], torch.Tensor]
    gathers: bool = False

    def right(self, value: float, world_size: int) -> float:
        return 16.0 * value * (1 if self.gathers else world_size)

    def is_right(self, found: torch.Tensor, value: float, world_size: int) -> bool:
        return bool((found == self.right(value, world_size)).all())


def _operands(pattern: str, launch: Launch, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ROWS if pattern == GATHER else ROWS * launch.world_size
    return torch.full((rows, 16), value).half(), torch.ones(16, 16).half().t()


def _fused(pattern: str, parameters: FusedParameters = FUSED) -> Call:
    def run(launch: Launch, value: float) -> torch.Tensor:
        return getattr(fused, pattern)(*_operands(pattern, launch, value), launch, parameters)

    return Call(run, pattern == GATHER)


def _with_gathered(run: Callable[[torch.Tensor, torch.Tensor, Launch], Sequence[torch.Tensor]]) -> Call:
    """A gather that also returns the gathered tensor, times 16. Each element of the product is a sum of 16 equal terms,
    so all elements of both tensors are equal."""

    def both(launch: Launch, value: float) -> torch.Tensor:
        product, gathered = run(*_operands(GATHER, launch, value), launch)
        return torch.stack([product, 16 * gathered])

    return Call(both, gathers=True)


def _fused_with_gathered(a: torch.Tensor, b: torch.Tensor, launch: Launch) -> Sequence[torch.Tensor]:
    return fused_ops._gather(GATHER, a, [b], [None], True, launch, FUSED)


def _chunked_with_gathered(a: torch.Tensor, b: torch.Tensor, launch: Launch) -> Sequence[torch.Tensor]:
    return gather_launch.all_gather_matmul(a, [VendorMatmul(b)], launch, CHUNKED, gathered_used=True)


def _chunked(pattern: str, parameters: ChunkedParameters = CHUNKED) -> Call:
    def run(launch: Launch, value: float) -> torch.Tensor:
        a, b = _operands(pattern, launch, value)
        if pattern == GATHER:
            return gather_launch.all_gather_matmul(a, [VendorMatmul(b)], launch, parameters)[0]
        return getattr(reduce_launch, pattern)(a, VendorMatmul(b), launch, parameters)

    return Call(run, pattern == GATHER)


def _fused_exchange(pattern: str, parameters: FusedParameters = FUSED) -> Call:
    def run(launch: Launch, value: float) -> torch.Tensor:
        return getattr(fused, pattern)(*_operands(SCATTER, launch, value), launch, parameters)

    return Call(run, gathers=True)


def _contracted(launch: Launch, value: float) -> torch.Tensor:
    """The sum has ``world_size`` times as many terms as in other calls, so it is divided by ``world_size``."""
    a, w = torch.full((ROWS * launch.world_size, 16), value).half(), launch.world_size
    return contracted_all_to_all_matmul(a, torch.ones(16, 16 * w).half().t(), launch, FUSED) / w


def _sent_in_chunks(launch: Launch, value: float) -> torch.Tensor:
    a, b = _operands(SCATTER, launch, value)
    return exchange_launch.matmul_all_to_all(a, VendorMatmul(b), launch, CHUNKED)


def _received_in_chunks(launch: Launch, value: float) -> torch.Tensor:
    a, b = _operands(SCATTER, launch, value)
    return gather_launch.all_to_all_matmul(a, [VendorMatmul(b)], launch, replace(CHUNKED, transport="copy_engine"))[0]


def _contracted_in_chunks(launch: Launch, value: float) -> torch.Tensor:
    """The sum runs over the slices of all ranks, so it is divided by their number."""
    a, b = _operands(SCATTER, launch, value)
    parameters = replace(CHUNKED, transport="copy_engine", bands=2)
    matmul = VendorMatmul(b.repeat(launch.world_size, 1))
    return contracted_launch.contracted_all_to_all_matmul(a, [matmul], launch, parameters)[0] / launch.world_size


def _output(parameters: ChunkedParameters, side_by_side: bool = False) -> Call:
    def run(launch: Launch, value: float) -> torch.Tensor:
        if parameters.reads:
            launch = replace(launch, slot=replace(launch.slot, protocol=READS))
        a, b = _operands(GATHER, launch, value)
        return output_launch.matmul_all_gather(a, VendorMatmul(b), launch, parameters, side_by_side)

    return Call(run, gathers=True)


def _small(two_shot: bool, norm: bool) -> Call:
    parameters = SmallParameters(two_shot, 16, 4)

    def run(launch: Launch, value: float) -> torch.Tensor:
        launch = replace(launch, slot=replace(launch.slot, protocol=HALVES))
        product = torch.full((4, 32), 16 * value).half()
        if not norm:
            return small_message.all_reduce(product, launch, parameters)
        residual, weight = torch.zeros(4, 32).half(), torch.ones(32).half()
        normed, residual_out = small_message.all_reduce_norm(product, residual, weight, 0.0, launch, parameters)
        # RMSNorm turns a row of equal numbers into ones. A wrong ``normed`` is returned, so that the test fails.
        return torch.where((normed == 1).all(), residual_out, normed)

    return Call(run)


def _tables(launch: Launch, value: float) -> torch.Tensor:
    """Each bag sums four rows. Each element of a row is ``4 * value``."""
    table, bags = torch.full((3, 8), 4.0 * value), 4 * launch.world_size
    indices, offsets = torch.arange(4 * bags) % 3, 4 * torch.arange(bags)
    lookups = Lookups([table], [indices], [offsets], [], [-1], bags, False, False, True)
    return look_up(lookups, launch, TableParameters(1, blocks_an_sm=1, unroll=4, bags=4, copies=1, copy_words=32))


EVERY = {
    **{f"fused {pattern}": _fused(pattern) for pattern in (GATHER, SCATTER, REDUCE)},
    "fused gather in slices": _fused(GATHER, replace(FUSED, slices=2, slices_tiles=2**20, slices_pushers=1)),
    "fused gather, gathered tensor read": _with_gathered(_fused_with_gathered),
    "fused gather by copies": _fused(GATHER, replace(FUSED, copies_from=0)),
    **{f"chunked {pattern}, pushed": _chunked(pattern) for pattern in (GATHER, SCATTER, REDUCE)},
    "chunked gather, pushed, gathered tensor read": _with_gathered(_chunked_with_gathered),
    "chunked all-reduce, copied in bands": _chunked(REDUCE, replace(CHUNKED, transport="copy_engine", bands=2)),
    "fused tables": Call(_tables, gathers=True),
    "fused matmul_all_to_all": _fused_exchange("matmul_all_to_all"),
    "fused all_to_all_matmul": _fused_exchange("all_to_all_matmul"),
    "fused contraction": Call(_contracted, gathers=True),
    "fused all_to_all_matmul in slices": _fused_exchange(
        "all_to_all_matmul", replace(FUSED, slices=2, slices_tiles=2**20, slices_pushers=1)
    ),
    "fused all_to_all_matmul by copies": _fused_exchange("all_to_all_matmul", replace(FUSED, copies_from=0)),
    "chunked matmul_all_to_all, pushed": Call(_sent_in_chunks, gathers=True),
    "chunked all_to_all_matmul, copied": Call(_received_in_chunks, gathers=True),
    "chunked contracted all_to_all_matmul, copied in bands": Call(_contracted_in_chunks, gathers=True),
    "chunked matmul_all_gather, pushed in bands": _output(replace(CHUNKED, bands=2), side_by_side=True),
    "chunked matmul_all_gather, read in bands": _output(replace(CHUNKED, transport="auto", bands=2, reads=True)),
    "chunked matmul_all_gather, read side by side": _output(
        replace(CHUNKED, transport="auto", bands=2, reads=True), side_by_side=True
    ),
    "small_message, one-shot": _small(False, False),
    "small_message, one-shot with norm": _small(False, True),
    "small_message, two-shot": _small(True, False),
    "small_message, two-shot with norm": _small(True, True),
}
NBYTES, SIGNALS = 40_000, 64


def workspace(world_size: int) -> SharedWorkspace:
    """A workspace that is large enough for each call in ``EVERY``."""
    return SharedWorkspace.of(world_size, NBYTES, SIGNALS)

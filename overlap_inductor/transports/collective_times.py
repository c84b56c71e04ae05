# SPDX-License-Identifier: Apache-2.0
"""Times calls that all ranks of a group make together, and measures how a collective's time depends on its bytes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.transports.transport import WholeCollectives

SIZES = tuple(2**power for power in range(17, 27))
"""Bytes of the collectives that are timed for a curve: 128 KiB to 64 MiB. On NVLink, all ten together take
milliseconds."""
REPEATS = 3


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each call on this rank: the median of ``REPEATS`` measurements.

    All ranks that the calls communicate with run this together. Put the longest call first: then the host runs ahead of
    the GPU, and the host's time is not measured.
    """
    calls[0]()
    if device.type != "cuda":
        samples = []
        for call in [*calls] * REPEATS:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    else:
        torch.cuda.synchronize(device)
        calls[0]()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS * len(calls))]
        for call, (begin, end) in zip([*calls] * REPEATS, events):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        samples = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return [statistics.median(samples[i :: len(calls)]) for i in range(len(calls))]


def of_first_rank(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The first rank's ``values``, on all ranks of the group, so that all ranks decide alike."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(numbers, group_src=0, group=group)
    return [float(number) for number in numbers.tolist()]


def measured_curve(
    transport: WholeCollectives, scatters: bool, like: torch.Tensor, group: dist.ProcessGroup
) -> tuple[tuple[float, float], ...]:
    """``((bytes, seconds), ...)`` of a reduce-scatter (``scatters``) or an all-reduce, sorted by the bytes of a rank's
    input.

    All ranks of ``group`` call this together, and not while a CUDA graph is captured. ``like``: a tensor with the dtype
    and the device of what will be reduced.
    """
    per_row, device = group.size() * like.element_size(), like.device
    source = torch.zeros(max(SIZES) // per_row * group.size(), dtype=like.dtype, device=device)
    shares = source.new_empty(source.numel() // group.size())
    falling = sorted(SIZES, reverse=True)

    def call(nbytes: int) -> Callable[[], object]:
        share = shares[: nbytes // per_row]
        piece = source[: share.numel() * group.size()]
        return functools.partial(transport.reduce_rows, share if scatters else piece, piece, group)

    seconds = of_first_rank(seconds_of([call(nbytes) for nbytes in falling], device), group, device)
    return tuple(sorted(zip(map(float, falling), seconds)))

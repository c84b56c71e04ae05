"""Transport ``nccl``: whole collectives on a stream of their own, beside the kernel that makes what they send; and how
long they take.

A call of a collective runs on the stream that is current (``torch.distributed`` with ``async_op=False``), so that what
it waits for is what was queued there. On CPUs (gloo) there are no streams, and the same steps run one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

SIZES = tuple(2**power for power in range(17, 27))
"""Bytes of the collectives that a curve is measured at: 128 KiB to 64 MiB, milliseconds in total on NVLink."""
REPEATS = 3


@functools.cache
def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """The device's one stream for collectives, of the highest priority: a collective takes the next free SM before
    blocks of a later matmul do."""
    # (The highest that any GPU has; what lies beyond a GPU's range is its highest.)
    return torch.cuda.Stream(device, priority=-5)


@contextlib.contextmanager
def forked(device: torch.device) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """The communication stream goes on from here beside the current one, and is joined at the end, also where something
    failed: memory that it uses is not reused before, and a CUDA graph's capture is whole. Yields a context in which the
    communication stream is the current one."""
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    main, side = torch.cuda.current_stream(device), communication_stream(device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)


def reduce_rows(result: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``source`` over the ranks on the current stream: in place where it is ``result``, else rank ``r`` gets the
    ``r``-th equal share of it."""
    if result is source:
        dist.all_reduce(source, group=group)
    else:
        dist.reduce_scatter_tensor(result, source, group=group)


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each call on this rank: one call of the first to warm up, then all in turn, the median of ``REPEATS``.
    All ranks of whatever the calls communicate with do this together. Put the longest first: the host then runs ahead
    of the GPU and does not count."""
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
    """The group's first rank's numbers, on all of its ranks: what is decided by them is decided alike."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(numbers, group_src=0, group=group)
    return [float(number) for number in numbers.tolist()]


def measured_curve(scatters: bool, like: torch.Tensor, group: dist.ProcessGroup) -> tuple[tuple[float, float], ...]:
    """``((bytes, seconds), ...)`` of a reduce-scatter or an all-reduce by the bytes that a rank gives to it, rising.
    All ranks together; not while a CUDA graph is captured."""
    per_row, device = group.size() * like.element_size(), like.device
    source = torch.zeros(max(SIZES) // per_row * group.size(), dtype=like.dtype, device=device)
    shares = source.new_empty(source.numel() // group.size())
    falling = sorted(SIZES, reverse=True)

    def call(nbytes: int) -> Callable[[], object]:
        share = shares[: nbytes // per_row]
        piece = source[: share.numel() * group.size()]
        return functools.partial(reduce_rows, share if scatters else piece, piece, group)

    seconds = of_first_rank(seconds_of([call(nbytes) for nbytes in falling], device), group, device)
    return tuple(sorted(zip(map(float, falling), seconds)))

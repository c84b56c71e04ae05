"""Ranks as processes over shared memory, each running its kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing


def run_ranks(world_size: int, function: Callable[..., None], *args: Any, seconds: float = 200) -> None:
    """``function(rank, *args)`` in a process a rank (forked: no import is paid again, and no device is held). Fails where a rank does not end in time, or with an error."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=function, args=(r, *args)) for r in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
    hung = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
    assert not any(hung), f"ranks that still wait: {[r for r, h in enumerate(hung) if h]}"
    assert [p.exitcode for p in ranks] == [0] * world_size


def shared(*shape: int, dtype: torch.dtype = torch.int32, fill: float | None = None) -> torch.Tensor:
    made = torch.zeros(shape, dtype=dtype) if fill is None else torch.full(shape, fill, dtype=dtype)
    return made.share_memory_()


def addresses(tensors: torch.Tensor) -> torch.Tensor:
    """Where each rank's part of ``tensors`` lies in this process."""
    return torch.tensor([t.data_ptr() for t in tensors])

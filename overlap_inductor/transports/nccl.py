# SPDX-License-Identifier: Apache-2.0
"""Transport ``nccl``: whole collectives of ``torch.distributed`` on a separate stream. They overlap with the kernels
that compute what later collectives send. On CPUs (gloo) there are no streams, and nothing overlaps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class Nccl:
    """Implements ``transports.transport.WholeCollectives``."""

    name = "nccl"
    moved_by = "torch.distributed collectives"

    @contextlib.contextmanager
    def forked(self, device: torch.device) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """As ``WholeCollectives.forked``. The streams are joined even if the body raises. Without this join, the side
        stream's memory could be reused too early, and a CUDA graph's capture would stay incomplete."""
        if device.type != "cuda":
            yield contextlib.nullcontext()
            return
        main, side = torch.cuda.current_stream(device), communication_stream(device)
        side.wait_stream(main)
        try:
            yield torch.cuda.stream(side)
        finally:
            main.wait_stream(side)

    def reduce_rows(self, result: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
        if result is source:
            dist.all_reduce(source, group=group)
        else:
            dist.reduce_scatter_tensor(result, source, group=group)


@functools.cache
def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """The device's stream for collectives. Its priority is the highest, so a collective takes a free SM before a later
    matmul does."""
    # -5 is the highest priority of any GPU. A GPU with fewer priorities uses its own highest.
    return torch.cuda.Stream(device, priority=-5)

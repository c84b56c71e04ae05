"""Symmetric memory of a process group: the same allocation on every rank, each rank's mapped into all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SymmetricBuffer:
    """One allocation a rank. ``peers[r]`` is rank ``r``'s, as a tensor of this process (its own at its own rank); ``pointers`` is an int64
    tensor on the device with their addresses. The memory lives as long as this object."""

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    handle: Any


def allocate(elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> SymmetricBuffer:
    """Zeroed memory of ``elements`` on every rank. All ranks of the group call this together; not while a CUDA graph is captured."""
    from torch.distributed import _symmetric_memory

    local = _symmetric_memory.empty(elements, dtype=dtype, device=device).zero_()
    handle = _symmetric_memory.rendezvous(local, group)
    peers = tuple(local if r == group.rank() else handle.get_buffer(r, (elements,), dtype) for r in range(group.size()))
    pointers = torch.tensor([p.data_ptr() for p in peers], dtype=torch.int64, device=device)
    # (No rank may write to a peer's memory before the peer has cleared it.)
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    return SymmetricBuffer(local, peers, pointers, handle)


def write_value_on_stream(flags: torch.Tensor, index: int, value: int) -> None:
    """The current stream writes ``flags[index] = value`` (int32, maybe a peer's) after all work before it; not while a graph is captured."""
    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(flags.view(torch.uint32), index, value)

"""Symmetric memory of a process group: the same allocation on every rank, each rank's mapped into all others."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# (Asked in every call of an op: a name of this module is found faster than one of a module of a module.)
_initialized, _capturing = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Address of the current stream of a GPU, given by its number."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One allocation a rank. ``peers[r]`` is rank ``r``'s, as a tensor of this process (its own at its own rank);
    ``pointers`` is an int64 tensor on the device with their addresses. The memory lives as long as this object."""

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    handle: Any


Together = Callable[[str, Callable[[], Any]], Any]
"""``(what, attempt)``: makes an attempt on every rank of a group, and fails on all of them where it failed on one
(``runtime.all_or_none``)."""


def each_alone(what: str, attempt: Callable[[], Any]) -> Any:
    """``Together`` where a rank that fails may leave the others waiting."""
    return attempt()


def allocate(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, together: Together = each_alone
) -> SymmetricBuffer:
    """Zeroed memory of ``elements`` on every rank. All ranks of the group call this together; not while a CUDA graph is
    captured.

    What may fail on one rank alone is tried ``together``: taking the memory, before any rank waits for another one's
    handle, and mapping the peers'. Where it fails nothing is left.
    """
    # On a thread of its own: the rendezvous takes a little memory from the caching allocator for as long as the buffer
    # lives, and a first run under CUDA graph trees takes what its thread allocates for the graph's own.
    with ThreadPoolExecutor(1, "overlap_inductor allocates") as thread:
        return thread.submit(_allocate, elements, dtype, device, group, together).result()


def _allocate(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, together: Together
) -> SymmetricBuffer:
    from torch.distributed import _symmetric_memory

    # (A thread begins outside inference mode.)
    torch.cuda.set_device(device)
    nbytes = elements * dtype.itemsize
    local = together(
        f"allocate {nbytes} bytes of symmetric memory",
        lambda: _symmetric_memory.empty(elements, dtype=dtype, device=device).zero_(),
    )

    def connected() -> SymmetricBuffer:
        handle = _symmetric_memory.rendezvous(local, group)
        peers = tuple(
            local if r == group.rank() else handle.get_buffer(r, (elements,), dtype) for r in range(group.size())
        )
        pointers = lasting(torch.tensor([p.data_ptr() for p in peers], dtype=torch.int64), device)
        # (No rank may write to a peer's memory before the peer has cleared it.)
        torch.cuda.synchronize(device)
        return SymmetricBuffer(local, peers, pointers, handle)

    buffer: SymmetricBuffer = together(f"map {nbytes} bytes of every peer's symmetric memory", connected)
    dist.barrier(group=group)
    return buffer


def lasting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on the device, in memory of symmetric memory's own pool: what is allocated during a graph's first run
    must not count as that graph's own (CUDA graph trees take the run's allocations for theirs)."""
    if device.type != "cuda":
        return values.to(device)
    from torch.distributed import _symmetric_memory

    with torch.inference_mode(False):
        return _symmetric_memory.empty(values.shape, dtype=values.dtype, device=device).copy_(values)


def lasting_bytes(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes as ``lasting``, of any value; also while a CUDA graph is captured."""
    from torch.distributed import _symmetric_memory

    with torch.inference_mode(False):
        return _symmetric_memory.empty(size, dtype=torch.int8, device=device)


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return _initialized() and _capturing()


@functools.cache
def hardware_queues() -> int:
    """Queues of the device that the streams of this process share. (CUDA reads that once, too; 8 is its own number.)"""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(given) if given.isdecimal() and int(given) else 8


def one_queue() -> bool:
    """Whether all streams of this process share one queue of the device."""
    return hardware_queues() == 1


def stream_number(device: torch.device) -> int:
    """Address of the current stream; 0 where there are none."""
    return raw_stream(device.index) if device.type == "cuda" else 0


def current_stream_number() -> int:
    """Address of the current stream of the current GPU."""
    return raw_stream(torch.cuda.current_device())


def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; elsewhere 1, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def ranks_share_gpus() -> bool:
    """Whether symmetric memory is to allow several ranks on one GPU (torch's own switch)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def reach() -> tuple[object, ...]:
    """What decides whether kernels may reach other GPUs of this machine: capability, GPUs and ranks of the machine,
    GPUs out of reach. For the cache key, too."""
    if not torch.cuda.is_initialized():
        return ()
    return _reach(torch.cuda.current_device(), int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())))


@functools.cache
def _reach(here: int, local: int) -> tuple[object, ...]:
    cut_off = tuple(
        d for d in range(torch.cuda.device_count()) if d != here and not torch.cuda.can_device_access_peer(here, d)
    )
    return torch.cuda.get_device_capability(here), torch.cuda.device_count(), local, cut_off


def why_no_kernels(device: torch.device) -> str | None:
    """Why this project's kernels cannot run on the GPUs of a group, from what every rank of it knows alike; or
    ``None``."""
    facts = reach()
    if device.type != "cuda" or not facts:
        return f"its tensors lie on {device.type}; it needs NVIDIA GPUs"
    if torch.version.hip is not None or facts[0][0] != 9:  # type: ignore[index]
        return f"this GPU has compute capability {facts[0]}; its kernels are made for NVIDIA's (9, 0)"
    return None


def _machines(ranks: tuple[int, ...]) -> int:
    """Machines on which the ranks lie."""
    _, _, local, _ = reach()
    return len({rank // local for rank in ranks})  # type: ignore[operator]


def why_no_symmetric_memory(ranks: tuple[int, ...], device: torch.device) -> str | None:
    """Why kernels of this group cannot reach the peers' memory, from what every rank of the group knows alike; or
    ``None``."""
    reason = why_no_kernels(device)
    if reason is not None:
        return f"{reason} of one machine" if device.type != "cuda" else reason
    _, _, local, cut_off = reach()
    if torch.cuda.device_count() < len(ranks) and not ranks_share_gpus():
        return f"this process sees {torch.cuda.device_count()} of the {len(ranks)} GPUs"
    if (machines := _machines(ranks)) > 1:
        return f"its ranks lie on {machines} machines ({local} ranks each)"
    return f"this GPU cannot reach the memory of GPUs {cut_off}" if cut_off else None


def without_peers(ranks: tuple[int, ...], device: torch.device) -> bool:
    """Whether the group's GPUs lie in one machine and none reaches another's memory, so that collectives go through the
    host's. The same on every rank: rank ``r`` is taken to have the GPU of its place in the machine."""
    facts = reach()
    if why_no_kernels(device) is not None or not facts or _machines(ranks) != 1:
        return False
    _, count, local, _ = facts
    gpus = tuple(sorted(rank % local for rank in ranks))  # type: ignore[operator]
    return gpus[-1] < count and _all_cut_off(gpus)  # type: ignore[operator]


@functools.cache
def _all_cut_off(gpus: tuple[int, ...]) -> bool:
    return not any(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)


def write_value_on_stream(flags: torch.Tensor, index: int, value: int) -> None:
    """The current stream writes ``flags[index] = value`` (int32, maybe a peer's) after all work before it; not while a
    graph is captured."""
    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(flags.view(torch.uint32), index, value)

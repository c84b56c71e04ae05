# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a process group: one allocation of the same size on every rank, which all ranks map."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.target import on_gpu
from overlap_inductor.torch_compat.target import target

# Every call of an op uses these functions. As globals of this module, they are found faster than in ``torch.cuda``.
_initialized, _capturing = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""``(GPU's number) -> address of its current stream``."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One allocation on each rank. The memory lives as long as this object.

    Attributes:
        local: this rank's allocation.
        peers: all ranks' allocations; ``local`` at this rank's index.
        pointers: int64 ``[ranks]`` on the device, the addresses of ``peers``.
        handle: torch's handle, kept alive.
    """

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    handle: Any


Together = Callable[[str, Callable[[], Any]], Any]
"""``(what, attempt) -> result``: runs the attempt on every rank of a group. If it fails on one rank, all ranks raise
(``runtime.all_or_none``)."""


def each_alone(what: str, attempt: Callable[[], Any]) -> Any:
    """A ``Together`` that tells no other rank of a failure, so the others may keep waiting."""
    return attempt()


def allocate(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, together: Together = each_alone
) -> SymmetricBuffer:
    """Zeros ``[elements]`` of ``dtype`` on every rank. All ranks of the group call this together, outside CUDA graph
    captures.

    A rank tries each of two steps ``together`` with the others: allocate, then map the peers' memory. A failed attempt
    leaves nothing allocated.

    Raises:
        NotOnAllRanks: a rank could not allocate or map (raised by ``runtime.all_or_none``). ``each_alone`` lets torch's
            own error through.
    """
    # During a graph's first run, CUDA graph trees claim all memory that the running thread allocates. The rendezvous
    # allocates a little memory and keeps it, so another thread runs the rendezvous.
    with ThreadPoolExecutor(1, "overlap_inductor allocates") as thread:
        return thread.submit(_allocate, elements, dtype, device, group, together).result()


def _allocate(
    elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, together: Together
) -> SymmetricBuffer:
    from torch.distributed import _symmetric_memory

    # The new thread inherits neither the caller's inference mode nor its current device.
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
        # No rank may write to a peer's memory before the peer has zeroed it.
        torch.cuda.synchronize(device)
        return SymmetricBuffer(local, peers, pointers, handle)

    buffer: SymmetricBuffer = together(f"map {nbytes} bytes of every peer's symmetric memory", connected)
    dist.barrier(group=group)
    return buffer


def lasting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on the device; on a GPU, in the pool of symmetric memory. CUDA graph trees claim other memory that a
    graph's first run allocates."""
    if device.type != "cuda":
        return values.to(device)
    from torch.distributed import _symmetric_memory

    with torch.inference_mode(False):
        return _symmetric_memory.empty(values.shape, dtype=values.dtype, device=device).copy_(values)


def lasting_bytes(size: int, device: torch.device) -> torch.Tensor:
    """``size`` uninitialized bytes in the pool of symmetric memory. Allowed while a CUDA graph is captured."""
    from torch.distributed import _symmetric_memory

    with torch.inference_mode(False):
        return _symmetric_memory.empty(size, dtype=torch.int8, device=device)


def capturing() -> bool:
    return _initialized() and _capturing()


@functools.cache
def hardware_queues() -> int:
    """Number of hardware queues of this process's streams: ``CUDA_DEVICE_MAX_CONNECTIONS``, by default 8. Cached,
    because CUDA also reads the variable only once."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(given) if given.isdecimal() and int(given) else 8


def one_queue() -> bool:
    return hardware_queues() == 1


def stream_number(device: torch.device) -> int:
    """Address of the device's current stream; 0 on a device without streams."""
    return raw_stream(device.index) if device.type == "cuda" else 0


def current_stream_number() -> int:
    """Address of the current GPU's current stream."""
    return raw_stream(torch.cuda.current_device())


def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 1 on other devices, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def ranks_share_gpus() -> bool:
    """Whether torch's environment variable lets ranks on the same GPU use symmetric memory."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


class Reach(NamedTuple):
    """What decides whether kernels may reach other GPUs of this machine.

    Attributes:
        capability: compute capability of this GPU.
        gpus: number of GPUs that this process sees.
        local_ranks: number of ranks on each machine.
        cut_off: numbers of the GPUs whose memory this GPU cannot reach.
    """

    capability: tuple[int, int]
    gpus: int
    local_ranks: int
    cut_off: tuple[int, ...]


def reach() -> Reach | None:
    """If plans are made for another machine (``target``): the ``Reach`` of one of its GPUs. If not: the ``Reach`` of
    this process's GPU, or ``None`` before CUDA is initialized."""
    if (box := target()) is not None:
        return Reach(box.capability, box.gpus, box.gpus, ())
    if not torch.cuda.is_initialized():
        return None
    return _reach(torch.cuda.current_device(), int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())))


@functools.cache
def _reach(here: int, local: int) -> Reach:
    cut_off = tuple(
        d for d in range(torch.cuda.device_count()) if d != here and not torch.cuda.can_device_access_peer(here, d)
    )
    return Reach(torch.cuda.get_device_capability(here), torch.cuda.device_count(), local, cut_off)


def why_no_kernels(device: torch.device) -> str | None:
    """Why this package's kernels cannot run on the GPU, or ``None``. After CUDA is initialized, the answer is
    the same on all ranks with this kind of GPU."""
    facts = reach()
    if not on_gpu(device):
        return f"it needs NVIDIA GPUs; the tensors are on {device.type}"
    if facts is None:
        return "it needs the facts of this process's GPU, and CUDA is not initialized yet; call torch.cuda.init() first"
    if (torch.version.hip is not None and target() is None) or facts.capability[0] != 9:
        return f"this GPU has compute capability {facts.capability}; the kernels need NVIDIA's (9, 0)"
    return None


def _machines(ranks: tuple[int, ...], local_ranks: int) -> int:
    return len({rank // local_ranks for rank in ranks})


def why_no_symmetric_memory(ranks: tuple[int, ...], device: torch.device) -> str | None:
    """Why kernels of these global ranks cannot reach peers' memory, or ``None``. The answer is the same on all ranks
    if their GPUs are alike and equally linked."""
    reason = why_no_kernels(device)
    facts = reach()
    if not on_gpu(device):
        return f"it needs NVIDIA GPUs of one machine; the tensors are on {device.type}"
    if reason is not None or facts is None:
        return reason
    if facts.gpus < len(ranks) and not ranks_share_gpus():
        return f"it needs {len(ranks)} GPUs, one for each rank; this process sees {facts.gpus}"
    if (machines := _machines(ranks, facts.local_ranks)) > 1:
        return f"the group's ranks run on {machines} machines (the job has {facts.local_ranks} ranks on each machine)"
    return f"this GPU cannot reach the memory of GPUs {facts.cut_off}" if facts.cut_off else None


def without_peers(ranks: tuple[int, ...], device: torch.device) -> bool:
    """Whether these global ranks are on one machine, and no GPU of these ranks reaches the memory of another. Their
    collectives then go through the host's memory. False if ``why_no_kernels`` gives a reason, or if plans are made for
    another machine. Rank ``r`` is assumed to use GPU ``r % local_ranks``, so every rank has the same answer."""
    facts = reach()
    if (
        target() is not None
        or why_no_kernels(device) is not None
        or facts is None
        or _machines(ranks, facts.local_ranks) != 1
    ):
        return False
    gpus = tuple(sorted(rank % facts.local_ranks for rank in ranks))
    return gpus[-1] < facts.gpus and _all_cut_off(gpus)


@functools.cache
def _all_cut_off(gpus: tuple[int, ...]) -> bool:
    return not any(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)


def write_value_on_stream(flags: torch.Tensor, index: int, value: int) -> None:
    """Queue the write ``flags[index] = value`` on the current stream. Not allowed while a CUDA graph is captured.
    ``flags``: int32, this rank's memory or a peer's."""
    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(flags.view(torch.uint32), index, value)

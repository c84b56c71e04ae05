"""What is asked of CUDA's driver itself: copies by address, and a stream that is nobody else's.

A copy takes some 7 us of a slow host, where a slice and its ``copy_`` take 13; a call of eight ranks has fourteen and more. No extent is checked: whoever prepares a
transfer has compared it with the slot.

CUDA graphs: a copy on a stream that is being captured becomes a node of the graph, as ``copy_``'s does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from overlap_inductor.errors import UnsupportedError

Copy = Callable[[int, int, int, int], None]
"""``(to, from, bytes, stream)``: addresses, and a stream's number, behind whose work the copy runs."""
NON_BLOCKING = 1
"""Of a stream: it does not wait for the default one."""


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def copier(device_type: str) -> Copy:
    """What copies memory of a device type; on a CPU at once.

    Raises:
        UnsupportedError: a device type whose driver is not known here.
    """
    if device_type == "cpu":
        return _copy_at_once
    if device_type != "cuda" or torch.version.hip is not None:
        raise UnsupportedError(f"transport copy_engine starts copies by CUDA's driver, not on {device_type!r}; set OVERLAP_INDUCTOR_TRANSPORT=sm_push")
    start = _library().cuMemcpyAsync
    start.argtypes, start.restype = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p), ctypes.c_int

    def copy(to: int, source: int, size: int, stream: int) -> None:
        status = start(to, source, size, stream)
        if status:
            raise RuntimeError(f"cuMemcpyAsync of {size} bytes returned CUresult {status}")

    return copy


def _copy_at_once(to: int, source: int, size: int, stream: int) -> None:
    ctypes.memmove(to, source, size)


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream of ``device``, which is never given back. (``torch.cuda.Stream`` hands out 32 in turn.)

    Raises:
        RuntimeError: the driver made none.
    """
    with torch.cuda.device(device):
        # (The device's context is the current one from its first use on.)
        torch.cuda.current_stream(device).query()
        made = ctypes.c_void_p()
        status = _library().cuStreamCreate(ctypes.byref(made), ctypes.c_uint(NON_BLOCKING))
    if status or not made.value:
        raise RuntimeError(f"cuStreamCreate on {device} returned CUresult {status}")
    return torch.cuda.ExternalStream(made.value, device=device)

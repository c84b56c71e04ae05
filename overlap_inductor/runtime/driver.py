"""What is asked of CUDA's driver itself, by its documented calls: copies by address, what an address belongs to, a
stream that is nobody else's, and graphs.

A copy takes some 7 us of a slow host, where a slice and its ``copy_`` take 13; a call of eight ranks has fourteen and
more. No extent is checked: whoever prepares a transfer has compared it with the slot. A copy on a stream that is being
captured becomes a node of the graph, as ``copy_``'s does.

Graphs are not captured by ``torch.cuda.CUDAGraph``: where such a capture fails, torch's random numbers and its
allocator go on as if it lasted, and the process ends (torch 2.11). A capture by the driver that fails leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterator

import torch

from overlap_inductor.errors import UnsupportedError

Copy = Callable[[int, int, int, int], None]
"""``(to, from, bytes, stream)``: addresses, and a stream's number, behind whose work the copy runs. Raises
``RuntimeError`` where the driver starts none."""
NON_BLOCKING = 1
"""Of a stream: it does not wait for the default one."""
THREAD_LOCAL = 1
"""Of a capture: other threads may do what they like."""
USE_NODE_PRIORITY = 8
"""Of a graph: kernels keep the priority of the stream on which they were captured."""


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _function(name: str, *argument_types: type) -> Callable[..., None]:
    """A call of the driver, whose failure is a ``RuntimeError``."""
    call = getattr(_library(), name)
    call.argtypes, call.restype = argument_types, ctypes.c_int

    def checked(*arguments: object) -> None:
        status = call(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUresult {status}, for {arguments}")

    return checked


@functools.cache
def copier(device_type: str) -> Copy:
    """What copies memory of a device type; on a CPU at once.

    Raises:
        UnsupportedError: a device type whose driver is not known here.
    """
    if device_type == "cpu":
        return _copy_at_once
    if device_type != "cuda" or torch.version.hip is not None:
        raise UnsupportedError(
            f"transport copy_engine starts copies by CUDA's driver, not on {device_type!r}; set"
            " OVERLAP_INDUCTOR_TRANSPORT=sm_push"
        )
    return _function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


def _copy_at_once(to: int, source: int, size: int, stream: int) -> None:
    ctypes.memmove(to, source, size)


HOST_MEMORY_FOR_ALL = 1 | 2
"""Of pages of the host: every GPU of the process may use them, at an address of its own."""


def mapped_address(address: int, size: int, device_type: str) -> int:
    """Let GPUs read and write whole pages of the host's memory. Returns their address for the current device. Raises
    ``RuntimeError``."""
    if device_type == "cpu":
        return address
    # (The device's context must be this thread's.)
    torch.cuda.is_current_stream_capturing()
    register = _function("cuMemHostRegister_v2", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    register(address, size, HOST_MEMORY_FOR_ALL)
    found = ctypes.c_uint64()
    device_pointer = _function("cuMemHostGetDevicePointer_v2", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    device_pointer(ctypes.byref(found), address, 0)
    return found.value


BUFFER_ID = 7
"""Attribute of an address: a number of its allocation, which no other one of the process has had or will have."""


def allocation(address: int) -> int:
    """The number of the allocation that ``address`` of a GPU's memory lies in. Raises ``RuntimeError`` where it lies in
    none."""
    found = ctypes.c_ulonglong()
    _function("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(
        ctypes.byref(found), BUFFER_ID, address
    )
    return found.value


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A new stream of the current ``device``, which is never given back; ``priority``: -1 is higher.
    (``torch.cuda.Stream`` hands out 32 in turn: whoever is given the same one has his launches captured, or held up.)
    Raises ``RuntimeError``."""
    # (The device's context must be this thread's; unlike others this call may stand in a capture.)
    torch.cuda.is_current_stream_capturing()
    made = ctypes.c_void_p()
    _function("cuStreamCreateWithPriority", ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)(
        ctypes.byref(made), NON_BLOCKING, priority
    )
    return torch.cuda.ExternalStream(made.value, device=device)


CAPTURING = 1
"""Status of a stream that is being captured."""


def capture_number(stream: int) -> int:
    """The number of the capture that a stream is in, given by its number; no other one of the process has had or will
    have it. 0: it is in none. Raises ``RuntimeError``."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    call = _function("cuStreamGetCaptureInfo_v2", *[ctypes.c_void_p] * 6)
    call(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if status.value == CAPTURING else 0


@contextlib.contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """While another thread captures a graph, this one may ask here for events of ``device`` that are outside of that
    capture. (Else CUDA refuses to say how far an event is, and ends the capture, where that was begun in torch's own
    mode ``global``.) Raises ``RuntimeError``."""
    exchange = _function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)
    mode = ctypes.c_int(THREAD_LOCAL)
    with torch.cuda.device(device):
        # (From here on the device's context is this thread's.)
        torch.cuda.is_current_stream_capturing()
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            # (What this thread had before.)
            exchange(ctypes.byref(mode))


class Graph:
    """What ``start`` launches on the current stream, captured."""

    def __init__(self, start: Callable[[], None], stream: int) -> None:
        """``stream``: number of the current one, which is no default stream. Raises ``RuntimeError``, and whatever
        ``start`` raises."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        _function("cuStreamBeginCapture_v2", ctypes.c_void_p, ctypes.c_int)(stream, THREAD_LOCAL)
        try:
            try:
                start()
            finally:
                _function("cuStreamEndCapture", ctypes.c_void_p, ctypes.c_void_p)(stream, ctypes.byref(graph))
            instantiate = _function("cuGraphInstantiateWithFlags", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
            instantiate(ctypes.byref(made), graph, USE_NODE_PRIORITY)
        finally:
            if graph.value:
                _function("cuGraphDestroy", ctypes.c_void_p)(graph)
        self._launch = _function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p)
        self._made = made.value
        # (Not when the process ends: the driver may be gone by then.)
        weakref.finalize(self, _function("cuGraphExecDestroy", ctypes.c_void_p), made).atexit = False

    def launch(self, stream: int) -> None:
        """Launch it on a stream, given by its number. Raises ``RuntimeError``."""
        self._launch(self._made, stream)

# SPDX-License-Identifier: Apache-2.0
"""Calls CUDA's driver through its documented API: copies by address, mapped host memory, allocations, streams that no
other code uses, and captures.

A copy by address takes about 7 us on a slow host; a slice and its ``copy_`` take 13 us. No bounds are checked. A copy
on a stream that is being captured becomes a node of the graph.

Captures do not use ``torch.cuda.CUDAGraph``. If a capture of a ``CUDAGraph`` fails, torch's random number generator and
allocator behave as if the capture still ran (torch 2.11). A failed capture through the driver leaves no state behind.
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
"""``(to, from, bytes, stream)``: two addresses, and the number of the stream on which the copy is queued. Raises
``RuntimeError`` if the driver refuses."""
PlaneCopy = Callable[[int, int, int, int, int, int], None]
"""``(to, pitch, from, width, height, stream)``: as ``Copy``, for ``height`` runs of ``width`` bytes. The runs follow
each other in the source, and begin ``pitch`` bytes apart in the target."""
NON_BLOCKING = 1
"""Flag of a stream that does not wait for the default stream."""
THREAD_LOCAL = 1
"""Mode of a capture that restricts only the calls of its own thread."""
USE_NODE_PRIORITY = 8
"""Flag of a graph whose kernels keep the priority of the stream on which they were captured."""


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _function(name: str, *argument_types: type) -> Callable[..., None]:
    """A function of the driver that raises ``RuntimeError`` if it fails."""
    call = getattr(_library(), name)
    call.argtypes, call.restype = argument_types, ctypes.c_int

    def checked(*arguments: object) -> None:
        status = call(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUresult {status}, for {arguments}")

    return checked


@functools.cache
def copier(device_type: str) -> Copy:
    """The function that copies memory on devices of this type. For ``cpu`` it copies before it returns.

    Raises:
        UnsupportedError: the device type is neither ``cpu`` nor NVIDIA's ``cuda``.
    """
    if device_type == "cpu":
        return _copy_at_once
    if device_type != "cuda" or torch.version.hip is not None:
        device = "a ROCm GPU" if device_type == "cuda" else repr(device_type)
        raise UnsupportedError(
            f"copies are started by NVIDIA's CUDA driver, and this device is {device}. Choose a transport that does not"
            " copy through the driver: `overlap-inductor doctor` lists the schedules that run here, and each schedule's"
            " transports"
        )
    return _function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


class _Plane(ctypes.Structure):
    """``CUDA_MEMCPY2D``: a copy of ``height`` runs of ``width`` bytes, which begin a pitch apart."""

    _fields_ = [
        (end + name, kind)
        for end in ("source_", "target_")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("memory", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


UNIFIED = 4
"""Type of memory whose place the driver knows by its address, also that of a peer."""


@functools.cache
def plane_copier(device_type: str) -> PlaneCopy:
    """The function that copies runs of bytes into memory on devices of this type. Raises ``UnsupportedError`` as
    ``copier``."""
    whole = copier(device_type)
    if device_type == "cpu":

        def at_once(to: int, pitch: int, source: int, width: int, height: int, stream: int) -> None:
            for row in range(height):
                whole(to + row * pitch, source + row * width, width, stream)

        return at_once
    start = _function("cuMemcpy2DAsync_v2", ctypes.c_void_p, ctypes.c_void_p)

    def plane(to: int, pitch: int, source: int, width: int, height: int, stream: int) -> None:
        wanted = _Plane(
            source_memory=UNIFIED, source_device=source, source_pitch=width,
            target_memory=UNIFIED, target_device=to, target_pitch=pitch, width=width, height=height,
        )  # fmt: skip
        start(ctypes.byref(wanted), stream)

    return plane


def _copy_at_once(to: int, source: int, size: int, stream: int) -> None:
    ctypes.memmove(to, source, size)


HOST_MEMORY_FOR_ALL = 1 | 2
"""Flags of registered host pages: every GPU of the process may use them, at its own address."""


def mapped_address(address: int, size: int, device_type: str) -> int:
    """Let GPUs read and write whole pages of the host's memory.

    Args:
        address: address of the first page.
        size: number of bytes, a multiple of the page size.

    Returns:
        the pages' address for the current device; ``address`` itself for ``cpu``.

    Raises:
        RuntimeError: the driver refuses.
    """
    if device_type == "cpu":
        return address
    # Makes the device's context current on this thread.
    torch.cuda.is_current_stream_capturing()
    register = _function("cuMemHostRegister_v2", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    register(address, size, HOST_MEMORY_FOR_ALL)
    found = ctypes.c_uint64()
    device_pointer = _function("cuMemHostGetDevicePointer_v2", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    device_pointer(ctypes.byref(found), address, 0)
    return found.value


BUFFER_ID = 7
"""Attribute of an address: the number of its allocation, which no other allocation of the process ever has."""


def allocation(address: int) -> int:
    """The number of the allocation in GPU memory that contains ``address``. Raises ``RuntimeError`` if none contains
    it."""
    found = ctypes.c_ulonglong()
    _function("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(
        ctypes.byref(found), BUFFER_ID, address
    )
    return found.value


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A new stream of ``device``, which must be the current device. The stream is never destroyed. ``priority``: -1 is
    higher than 0. Raises ``RuntimeError`` if the driver refuses.

    ``torch.cuda.Stream`` returns the same 32 streams again and again. Two users of one stream would wait for each
    other.
    """
    # Makes the device's context current on this thread, and is allowed in a capture.
    torch.cuda.is_current_stream_capturing()
    made = ctypes.c_void_p()
    _function("cuStreamCreateWithPriority", ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)(
        ctypes.byref(made), NON_BLOCKING, priority
    )
    return torch.cuda.ExternalStream(made.value, device=device)


NO_TIMING = 2
"""Flag of an event that does not measure time."""


class Mark:
    """An event, for streams given by their numbers. It is never destroyed. Raises ``RuntimeError`` if the driver
    refuses. The device must be the current one."""

    def __init__(self) -> None:
        # Makes the device's context current on this thread, and is allowed in a capture.
        torch.cuda.is_current_stream_capturing()
        made = ctypes.c_void_p()
        _function("cuEventCreate", ctypes.c_void_p, ctypes.c_uint)(ctypes.byref(made), NO_TIMING)
        self._made = made.value
        self._record = _function("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)
        self._wait = _function("cuStreamWaitEvent", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)

    def record(self, stream: int) -> None:
        """Mark the end of everything that ``stream`` holds now."""
        self._record(self._made, stream)

    def hold(self, stream: int) -> None:
        """Make later work on ``stream`` wait for the mark."""
        self._wait(stream, self._made, 0)


CAPTURING = 1
"""Capture status of a stream that is being captured."""


def capture_number(stream: int) -> int:
    """The driver's number, unique in the process, of the capture to which ``stream`` (the address of a CUDA stream)
    belongs. 0 if the stream is not being captured, or if its capture has failed. Raises ``RuntimeError`` if the driver
    refuses."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    call = _function("cuStreamGetCaptureInfo_v2", *[ctypes.c_void_p] * 6)
    call(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if status.value == CAPTURING else 0


@contextlib.contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """In this context, this thread may query events of ``device`` while another thread captures a graph, if the capture
    did not record these events. Outside this context, such a query makes a capture in mode ``global`` fail. This mode
    is torch's default. Raises
    ``RuntimeError`` if the driver refuses."""
    exchange = _function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)
    mode = ctypes.c_int(THREAD_LOCAL)
    with torch.cuda.device(device):
        # Makes the device's context current on this thread.
        torch.cuda.is_current_stream_capturing()
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


class Graph:
    """A CUDA graph of the work that ``start`` launches on the current stream. The graph is destroyed with this
    object."""

    def __init__(self, start: Callable[[], None], stream: int) -> None:
        """``stream``: number of the current stream, which must not be the default stream. Raises what ``start`` raises,
        or ``RuntimeError`` if the driver refuses. If the error of ``start``
        has invalidated the capture, a ``RuntimeError`` is raised, and its context is the error of ``start``."""
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
        # At the process's exit, the driver may have shut down already.
        weakref.finalize(self, _function("cuGraphExecDestroy", ctypes.c_void_p), made).atexit = False

    def launch(self, stream: int) -> None:
        """Launch the graph on the stream with this number. Raises ``RuntimeError`` if the driver refuses."""
        self._launch(self._made, stream)

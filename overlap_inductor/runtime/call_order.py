# SPDX-License-Identifier: Apache-2.0
"""``CallOrder``: the order of the calls that use a workspace, on one device. These calls run one after the other, in
the order in which this process makes them, on any streams and from any threads.

Why. A kernel that waits for its peers may fill the GPU. If two such kernels on two streams start in different orders on
two ranks, they wait for each other. The hosts of all ranks make their calls in one order. This module makes the GPUs
keep this order. So the n-th call of a *slot* is the same call on all ranks. A slot is the part of a workspace that one
call uses (``runtime.arena``).

How. ``with call_order(device):`` encloses all launches of a call. The new call waits for the *end* of the previous
call: an event that is recorded after the previous call's last launch. The new call does not wait for later work on the
previous call's stream, because such work may wait for a peer that waits for the new call. ::

    rank 0:  A on S1, recv on S1, B on S2             B waits for A, not for recv
    rank 1:  A on S1, B on S2, send on S1             the send reads B's result, so it waits for B

Rank 0's recv waits for rank 1's send. If rank 0's B waited for the recv, rank 1's B would wait for rank 0's B for ever.

Threads. The order of calls is the order in which threads get the lock. A call's thread holds the lock from the wait for
the previous call until the new call's event is recorded. The lock also guards what calls on the device share: side
streams, prepared kernels, and graphs. If threads call at the same time, the program must ensure one order on all ranks,
as with NCCL.

Captures. In a capture, CUDA refuses to wait for an event from outside the capture. Outside, CUDA refuses to wait for an
event from a capture. So each capture has its own event. If a ``torch.cuda.CUDAGraph`` holds calls, each of its replays
counts as one call. A call is refused in a capture that is made without ``torch.cuda.CUDAGraph``, and in a capture that
began before the first ``CallOrder``. This module would not notice the replays of such a capture, and two calls could
use a slot at the same time. If a program launches the ``raw_cuda_graph_exec`` of a graph, it must ensure the order
itself.

A graph of ``runtime.replay`` is launched inside a call, so it needs no order of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import AbstractContextManager
from contextlib import ExitStack
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from types import TracebackType
from typing import Any

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.runtime import driver
from overlap_inductor.torch_compat import cuda_graphs
from overlap_inductor.torch_compat import symmetric

log = logging.getLogger("overlap_inductor")


class _Last:
    """The last call: its stream, as a number (``raw``) and as an object, and the event that marks its end. ``raw`` is
    ``None`` if there was no call."""

    raw: int | None = None
    stream: Any = None
    event: Any = None

    def ended(self, raw: int, stream: Any) -> None:
        if self.event is None:
            self.event = torch.cuda.Event()
        self.event.record(stream)
        self.raw, self.stream = raw, stream


@dataclass
class _Capture:
    """A capture in progress, and the last call of each device in it."""

    graph: weakref.ref[Any]
    last: dict[CallOrder, _Last] = field(default_factory=dict)


class CapturedGraphs:
    """Knows the captures of ``torch.cuda.CUDAGraph`` in progress, by the driver's number of the capture. Also knows,
    for each captured graph, the ``CallOrder`` of each device whose calls are in the graph. Implements
    ``torch_compat.cuda_graphs.Observer``."""

    def __init__(self) -> None:
        self._open: dict[int, _Capture] = {}
        self._holding: weakref.WeakKeyDictionary[Any, tuple[CallOrder, ...]] = weakref.WeakKeyDictionary()

    def begun(self, graph: Any) -> None:
        self._holding.pop(graph, None)
        try:
            number = driver.capture_number(symmetric.current_stream_number())
        except RuntimeError as error:
            log.warning(
                "overlap_inductor: CUDA does not tell which capture has begun, so no overlapped site can be captured in"
                " it (%s)",
                error,
            )
            return
        self._open[number] = _Capture(weakref.ref(graph))

    def ended(self, graph: Any) -> None:
        for number, capture in tuple(self._open.items()):
            if capture.graph() is graph:
                del self._open[number]
                if capture.last:
                    self._holding[graph] = tuple(sorted(capture.last, key=lambda order: order.device.index))

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        orders = self._holding.get(graph, ())
        if len(orders) <= 1:
            return orders[0] if orders else nullcontext()
        stack = ExitStack()
        for order in orders:
            # Sorted by the devices' numbers, so that all threads take the locks in the same order.
            stack.enter_context(order)
        return stack

    def last_of(self, order: CallOrder, raw: int) -> _Last:
        """The last call of ``order`` in the capture to which the stream ``raw`` belongs.

        Raises:
            UnsupportedError: the beginning of the capture was not observed, so its replays would not be seen.
        """
        capture = self._open.get(driver.capture_number(raw))
        if capture is None:
            raise UnsupportedError(
                "an overlapped site is being captured into a CUDA graph whose capture was not observed. Its"
                " replays could not be ordered against other calls, and two calls at once would use the same"
                " workspace. Run the function once and then capture it with torch.cuda.graph, or compile it inside"
                " overlap_inductor.overlap(mode='off')."
            )
        if order not in capture.last:
            capture.last[order] = _Last()
        return capture.last[order]


class CallOrder:
    """``with order:`` encloses all launches of a call on the current stream. A nested call is part of the outer one.

    Entering raises ``UnsupportedError`` inside a capture whose replays would not be seen."""

    def __init__(self, device: torch.device, graphs: CapturedGraphs) -> None:
        self.device = device
        self._graphs = graphs
        self._lock = threading.RLock()
        self._depth = 0
        self._outside = self._last = _Last()
        self._raw = 0
        self._stream: Any = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._depth == 0:
            try:
                self._begin()
            except BaseException:
                self._lock.release()
                raise
        self._depth += 1

    def _begin(self) -> None:
        raw = symmetric.stream_number(self.device)
        last = self._graphs.last_of(self, raw) if symmetric.capturing() else self._outside
        if last.raw == raw:
            self._stream = last.stream
        else:
            self._stream = torch.cuda.current_stream(self.device)
            if last.raw is not None:
                self._stream.wait_event(last.event)
        self._last, self._raw = last, raw

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._depth -= 1
            # The launches of a failed call are ordered, too, except in a capture. If the capture has failed, recording
            # an event would raise a second error that hides the first one.
            if self._depth == 0 and (kind is None or self._last is self._outside):
                self._last.ended(self._raw, self._stream)
        finally:
            self._lock.release()

    def in_flight(self) -> bool:
        """Whether the last call, or the last replay of a graph that holds calls, has not ended on the GPU. Any thread
        may ask, even during a capture. Raises ``RuntimeError`` if CUDA has failed."""
        if self._outside.raw is None:
            return False
        with driver.beside_captures(self.device):
            return not self._outside.event.query()

    def finish(self) -> None:
        """Wait for the end of all calls. Raises ``RuntimeError`` if CUDA has failed."""
        if self._outside.raw is not None:
            with driver.beside_captures(self.device):
                self._outside.event.synchronize()


_GRAPHS = CapturedGraphs()
_ORDERS: dict[torch.device, CallOrder] = {}
_LOCK = threading.Lock()
_AT_ONCE = nullcontext()


def call_order(device: torch.device) -> CallOrder | nullcontext[None]:
    """The device's ``CallOrder``, made at first use. The first one starts the observation of ``torch.cuda.CUDAGraph``
    captures. A device without streams needs no order, because its calls have ended when they return."""
    if device.type != "cuda":
        return _AT_ONCE
    known = _ORDERS.get(device)
    if known is None:
        with _LOCK:
            if not _ORDERS:
                cuda_graphs.observe(torch.cuda.CUDAGraph, _GRAPHS)
            known = _ORDERS.setdefault(device, CallOrder(device, _GRAPHS))
    return known


def orders() -> tuple[CallOrder, ...]:
    return tuple(_ORDERS.values())

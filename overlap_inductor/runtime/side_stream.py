# SPDX-License-Identifier: Apache-2.0
"""The streams, beside the current one, on which a schedule's transfers and waits run. A device needs one stream for
transfers, one for what is received, and one for waits. More are not needed, because the calls on a device run one
after the other (``runtime.call_order``)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import nullcontext
from types import TracebackType

import torch

from overlap_inductor.runtime.driver import Mark
from overlap_inductor.runtime.driver import own_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.streams import current_place
from overlap_inductor.torch_compat.streams import place_of
from overlap_inductor.torch_compat.streams import set_place
from overlap_inductor.torch_compat.symmetric import raw_stream


class SideStream:
    """Work launched inside ``with side:`` runs after the work that is already on the current stream, and concurrently
    with later work there. ``join`` makes the current stream wait for the side stream.

    An op that uses the side stream calls ``join`` before the op returns. So tensors that the side stream uses may be
    freed on the current stream, and a capture of the current stream also contains the side stream's work.
    """

    def __init__(self, device: torch.device) -> None:
        # Higher priority: the few blocks of this stream's kernels are scheduled before a matmul's next blocks.
        stream = own_stream(device, priority=-1)
        self._gpu, self._number, self._place = stream.device_index, stream.cuda_stream, place_of(stream)
        self._forked, self._done = Mark(), Mark()
        self._current = self._place
        self._used = False

    def __enter__(self) -> None:
        self._current, self._used = current_place(self._gpu), True
        self._forked.record(raw_stream(self._gpu))
        self._forked.hold(self._number)
        set_place(self._place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_place(self._current)

    def join(self) -> None:
        """Make the current stream wait for everything launched here. Does nothing if the side stream was not entered
        since the last ``join``. (In a capture, CUDA refuses to wait for a stream that the capture does not contain.)"""
        if not self._used:
            return
        self._used = False
        self._done.record(self._number)
        self._done.hold(raw_stream(self._gpu))


class InOrder(nullcontext[None]):
    """Replaces ``SideStream`` on a device without streams (interpreted kernels): work runs when it is launched."""

    def join(self) -> None:
        return None


class WaitingStream:
    """A stream for kernels that wait between copies. The copies run on the current stream. Call ``follow``
    first. Then ``before`` launches a kernel that waits, and the next copy on the current stream waits for this kernel.

    On one stream, a copy starts 12 us after the end of a kernel. If the copy instead waits for an event of another
    stream, and the event is long past, the copy starts at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device, priority=-1)
        self._begun, self._over = torch.cuda.Event(), torch.cuda.Event()

    def follow(self) -> None:
        """Make waits on this stream start after everything that the current stream holds now."""
        self._begun.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._begun)

    def before(self, wait: Callable[[], None]) -> None:
        """Launch ``wait`` on this stream, and make the current stream wait for everything on this stream."""
        current = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)
        try:
            wait()
        finally:
            torch.cuda.set_stream(current)
        self._over.record(self._stream)
        current.wait_event(self._over)


class WaitingInOrder:
    """Replaces ``WaitingStream`` on a device without streams."""

    def follow(self) -> None:
        return None

    def before(self, wait: Callable[[], None]) -> None:
        wait()


@functools.cache
def side_stream(device: torch.device) -> SideStream | InOrder:
    """The device's side stream, made at first use."""
    return SideStream(device) if device.type == "cuda" else InOrder()


@functools.cache
def receiving_stream(device: torch.device) -> SideStream | InOrder:
    """The device's stream for waits and copies of what peers sent, made at first use."""
    return SideStream(device) if device.type == "cuda" else InOrder()


@functools.cache
def waiting_stream(device: torch.device) -> WaitingStream | WaitingInOrder:
    """The device's stream for waits, made at first use."""
    return WaitingStream(device) if device.type == "cuda" else WaitingInOrder()


@contextlib.contextmanager
def one_call(launch: Launch, *sides: SideStream | InOrder) -> Iterator[None]:
    """Encloses the launches of one call, and joins the side streams after them. If a launch fails, the group is
    aborted, because peers wait for rows that were not sent. In a capture, nothing is aborted."""
    try:
        yield
    except BaseException:
        if not symmetric.capturing():
            launch.faults.abort()
        raise
    finally:
        for side in sides:
            side.join()

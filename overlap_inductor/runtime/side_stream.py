"""The streams beside the current one on which a schedule's transfers run, and what they wait for. One of each a device:
calls of a device are launched and run one after the other (``runtime.call_order``)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import nullcontext
from types import TracebackType

import torch

from overlap_inductor.runtime.driver import own_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric


class SideStream:
    """``with side:`` what is launched runs behind all that the current stream holds by then, beside what it is given
    later; ``join`` makes it wait.

    Every use ends with ``join`` before the op returns: so tensors that were used here may be freed on the current
    stream, and a CUDA graph that is captured there holds what ran here. (An event recorded anew is a new one to whoever
    waits from then on: two are enough.)
    """

    def __init__(self, device: torch.device) -> None:
        # Its few blocks go before a matmul's next ones.
        self._stream = own_stream(device, priority=-1)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._current = self._stream
        self._used = False

    def __enter__(self) -> None:
        self._current, self._used = torch.cuda.current_stream(self._stream.device), True
        self._forked.record(self._current)
        self._stream.wait_event(self._forked)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._current)

    def join(self) -> None:
        """The current stream goes on when all that was launched here is done. (Nothing, where it has not been entered
        since: in a capture this stream would be foreign.)"""
        if not self._used:
            return
        self._used = False
        self._done.record(self._stream)
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)


class InOrder(nullcontext[None]):
    """Where there are no streams (kernels are interpreted): one thing after the other."""

    def join(self) -> None:
        return None


class WaitingStream:
    """A stream for kernels that wait, so that what goes on behind them does so as soon as they end: a copy behind a
    kernel of its own stream begins 12 us after it, one behind an event that has long been reached at once. ``follow``
    it, then put a wait ``before`` what the current stream is given next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device, priority=-1)
        self._begun, self._over = torch.cuda.Event(), torch.cuda.Event()

    def follow(self) -> None:
        """What waits here begins behind all that the current stream holds by now."""
        self._begun.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._begun)

    def before(self, wait: Callable[[], None]) -> None:
        """The current stream goes on when all of this one is over, and then ``wait``."""
        current = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)
        try:
            wait()
        finally:
            torch.cuda.set_stream(current)
        self._over.record(self._stream)
        current.wait_event(self._over)


class WaitingInOrder:
    """As ``WaitingStream`` where there are no streams."""

    def follow(self) -> None:
        return None

    def before(self, wait: Callable[[], None]) -> None:
        wait()


@functools.cache
def side_stream(device: torch.device) -> SideStream | InOrder:
    """The device's side stream, made on first use."""
    return SideStream(device) if device.type == "cuda" else InOrder()


@functools.cache
def waiting_stream(device: torch.device) -> WaitingStream | WaitingInOrder:
    """The device's, made on first use."""
    return WaitingStream(device) if device.type == "cuda" else WaitingInOrder()


@contextlib.contextmanager
def one_call(launch: Launch, side: SideStream | InOrder) -> Iterator[None]:
    """The launches of one call. Its streams are one again behind it; where a launch fails the group is aborted, since
    its peers wait for what was not sent. (Not in a capture, in which nothing runs.)"""
    try:
        yield
    except BaseException:
        if not symmetric.capturing():
            launch.faults.abort()
        raise
    finally:
        side.join()

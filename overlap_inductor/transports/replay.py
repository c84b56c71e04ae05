"""The launches of a call as one CUDA graph, replayed when the call comes again with everything where it was.

A call of schedule ``chunked`` is 10 to 80 launches, for which the host took 240 to 690 us (4 H200s, a slow host); a replay of the same took 13 to 62, and one of a
single kernel 3 to 6. Compiled models allocate in the same order step after step, so a site's tensors soon lie where they lay before.

Contract. ``launched(launch, what, tensors, start, replays)``: ``start()`` launches on the current stream, and on streams that it forks and joins, work that depends on
``what``, on the layouts and addresses of ``tensors``, and on nothing else. ::

    first time with these       start()
    second time                 capture start(), replay it
    later                       replay it
    not ``replays``, inside the user's capture, on a CPU, or when there are too many graphs:   start()

Why that is right. Nothing of a call is baked into a graph: signals take their number from device memory, as in a graph that a user captures. Everything has been
loaded by the first call, so a capture waits for nothing on the device; what making a graph may wait for are calls before this one, for which no peer needs this
one. They share the vendor's workspace, since calls of a rank run one after the other on its GPU (``transports.workspace``).

They are captured on a thread of their own, on a stream that is nobody else's, with memory of a pool of their own: the vendor's library has a workspace for each thread
and stream, and one that was taken from the pool of a user's graph, or shared with a user's matmul, would be overwritten.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.driver import Graph
from overlap_inductor.transports.driver import own_stream
from overlap_inductor.transports.workspace import Launch

log = logging.getLogger("overlap_inductor")

MOST_GRAPHS = 1024
"""Of a device, those of groups that are no more included."""
MOST_FAILED = 3
"""Captures that may fail before no more are tried."""
MOST_SEEN = 256
"""Calls of a site that are remembered for having been seen once."""

Start = Callable[[], None]


def launched(launch: Launch, what: object, tensors: Sequence[torch.Tensor | None], start: Start, replays: bool) -> None:
    """Do what ``start`` does, in one launch where that is possible and ``replays`` are wanted. ``what``: hashable; it is kept."""
    device = launch.slot.calls.device
    if not replays or device.type != "cuda" or symmetric.capturing():
        start()
        return
    key = (what, *[None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
    known = launch.replays.get(key)
    if known is not None:
        known()
    elif key not in launch.seen:
        if len(launch.seen) >= MOST_SEEN:
            launch.seen.clear()
        # (Not seen where it fails: a capture must find everything loaded.)
        start()
        launch.seen.add(key)
    else:
        replay = recorder(device).replay_of(start)
        if replay is not None:
            launch.replays[key] = replay
        (replay or start)()


class Recorder:
    """Makes graphs of what is launched on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "overlap_inductor captures")
        self._place: tuple[torch.cuda.Stream, torch.cuda.MemPool] | None = None
        self._made = self._failed = 0

    @property
    def made(self) -> int:
        """Graphs made until now."""
        return self._made

    def replay_of(self, start: Start) -> Start | None:
        """What launches the graph of ``start``; ``None`` where none can be made, which the log says."""
        if self._made >= MOST_GRAPHS or self._failed >= MOST_FAILED:
            return None
        inference = torch.is_inference_mode_enabled()
        try:
            graph = self._thread.submit(self._captured, start, inference).result()
        except RuntimeError as error:
            # Nothing has run. (Launches one by one are as right, so that this must not end a model.)
            self._failed += 1
            log.warning("overlap_inductor: the launches of a site could not be captured into a CUDA graph, and are started one by one (%s)", error)
            return None
        self._made += 1
        if self._made == MOST_GRAPHS:
            log.info("overlap_inductor: %d CUDA graphs hold launches of sites; further ones are launched one by one", MOST_GRAPHS)
        return functools.partial(_replay, graph, self._device)

    def _captured(self, start: Start, inference: bool) -> Graph:
        torch.cuda.set_device(self._device)
        # (A thread begins outside inference mode, and the tensors are the caller's.)
        with torch.no_grad(), torch.inference_mode(inference):
            if self._place is None:
                self._place = self._prepared()
            stream, pool = self._place
            with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                return Graph(start, stream.cuda_stream)

    def _prepared(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
        """The stream and the memory. The vendor's library is made ready on this thread: that would end a capture."""
        stream, pool = own_stream(self._device), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
            small = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
            torch.mm(small, small)
        return stream, pool


def _replay(graph: Graph, device: torch.device) -> None:
    graph.launch(symmetric.stream_number(device))


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The device's, made on first use."""
    return Recorder(device)

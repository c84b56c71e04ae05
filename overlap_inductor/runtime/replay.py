# SPDX-License-Identifier: Apache-2.0
"""Replays the launches of a call as one CUDA graph if the call comes again with everything at the same place.

A call of schedule ``chunked`` has 10 to 80 launches, which took the host 240 to 690 us (4 H200s, a slow host). A replay
of the same call took 13 to 62 us, and a replay of a single kernel 3 to 6 us. Compiled models allocate in the same order
step after step, so a site's tensors soon lie where they lay before. A graph takes about 100 KiB of the device.

Contract. ``launched(launch, what, tensors, start, replays, copied)``: ``start()`` launches work on the current stream,
and on streams that it forks and joins. The work may depend on ``what``, on the layouts and addresses of ``tensors``, on
the allocations of those that copies read or write (``copied``), and on nothing else that changes. ::

    first call with these       start()
    second call                 capture start() and replay it; start() if it cannot be captured
    later calls                 replay it
    other allocations           drop the site's graphs, then as the first call
    never replayed              start(): ``replays`` is False, in the user's capture, on a CPU, with one hardware queue,
                                or if there are too many graphs

Why this is correct. A captured graph fixes only the values in its key; everything else is read at replay. Signals take
their number from device memory, as in a graph that a user captures. Kernels, slots and fault memory outlive the graph.
The first call has loaded every kernel, so a capture waits for nothing on the device. Making a graph may wait for
earlier calls; no peer needs this call for those to end. Graphs share the vendor library's workspace, because calls of a
rank run one after the other on its GPU (``runtime.call_order``, which also keeps two threads from using a site's graphs
at the same time).

Why allocations are compared. A kernel gets addresses, whatever lies there. A copy in a graph is bound to the allocation
with which it was captured. If the program has given that back (``torch.cuda.empty_cache()``, which ``torch.cuda.graph``
calls too) and another allocation has come to lie at the same address, ``cuGraphLaunch`` fails with
``CUDA_ERROR_INVALID_VALUE``, or the copy faults (driver 580; not if the new one begins where the old one did, nor in
the allocator's expandable segments).

Forward progress. Launched one by one, sends come before waits in every queue of the device. In a graph only edges order
anything, and its branches run beside each other. There are two branches, which take two queues (with
``CUDA_DEVICE_MAX_CONNECTIONS=1`` nothing is replayed), or three if copies take turns (which they do with three queues
and more). Copies of a graph run on copy engines, those of flags too (``tests.gpu.check_stress`` on driver 580).

Captures run on a thread of their own, on streams and with a memory pool that no one else uses. The vendor's library has
a workspace for each thread and stream. A workspace taken from the pool of a user's graph, or shared with a user's
matmul, would be overwritten.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from overlap_inductor.runtime import driver
from overlap_inductor.runtime.driver import Graph
from overlap_inductor.runtime.driver import own_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.symmetric import raw_stream

log = logging.getLogger("overlap_inductor")

MOST_GRAPHS = 2048
"""Graphs on a device: 200 MiB."""
MOST_OF_A_SITE = 256
"""Graphs of a site, and also calls of it that are remembered because they were seen once."""
MOST_FAILED = 16
"""Failed captures on a device after which no more are tried."""

Start = Callable[[], None]
Allocations = tuple[int, ...]


def launched(
    launch: Launch,
    what: object,
    tensors: Sequence[torch.Tensor | None],
    start: Start,
    replays: bool,
    copied: Sequence[torch.Tensor | None] = (),
) -> None:
    """Do what ``start`` does, in one launch if it can be replayed.

    Args:
        launch: of the site; its ``seen`` and ``replays`` are used.
        what: all that the launches depend on besides ``tensors``; hashable, and kept.
        tensors: those that the launches read or write, on the device.
        start: queues the launches on the current stream.
        replays: whether the call may be replayed.
        copied: those of ``tensors`` that copies may read or write, copies of the vendor's library included.

    Raises:
        RuntimeError: a graph that was launched before could not be launched; the group is aborted. Also what ``start``
            raises.
    """
    device = launch.slot.calls.device
    if not replays or device.type != "cuda" or symmetric.capturing() or symmetric.one_queue():
        start()
        return
    key = (what, *[None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
    try:
        allocations = tuple([driver.allocation(t.data_ptr()) for t in copied if t is not None]) if copied else ()
    except RuntimeError as error:
        # Without it, nothing tells whether this is the memory with which a graph was captured.
        _say_unknown(str(error).split(",")[0])
        start()
        return
    known = launch.replays.get(key)
    if known is not None and known[0] == allocations:
        try:
            known[1]()
        except RuntimeError:
            launch.faults.abort()
            raise
        return
    if known is not None:
        # The program has given memory back, probably that of other tensors too.
        launch.replays.clear()
        launch.seen.clear()
    seen = launch.seen.get(key)
    if seen is None or seen[0] != allocations:
        # Noted only if it succeeds: a capture must find everything loaded.
        start()
        if seen is None and len(launch.seen) >= MOST_OF_A_SITE:
            del launch.seen[next(iter(launch.seen))]
        launch.seen[key] = allocations, True
    elif not seen[1] or not _first_replay(launch, key, allocations, start, device):
        start()


@functools.cache
def _say_unknown(error: str) -> None:
    """Warn once, for any address."""
    log.warning(
        "overlap_inductor: the driver does not know the memory of a site's tensors, so its launches are started one by"
        " one (%s)",
        error,
    )


def _first_replay(launch: Launch, key: object, allocations: Allocations, start: Start, device: torch.device) -> bool:
    """Capture and launch. Returns False if that failed; the call is then not captured again while it is remembered."""
    # A graph is never dropped for another one: a site with more calls in turn would capture each of them every time.
    replay = recorder(device).replay_of(start) if len(launch.replays) < MOST_OF_A_SITE else None
    if replay is not None:
        try:
            replay()
        except RuntimeError as error:
            log.warning(
                "overlap_inductor: the CUDA graph of a site's launches cannot be launched; they are started one by one"
                " (%s)",
                error,
            )
        else:
            launch.replays[key] = allocations, replay
            return True
    launch.seen[key] = allocations, False
    return False


class Recorder:
    """Captures the launches of one device into graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "overlap_inductor captures")
        self._place: tuple[torch.cuda.Stream, torch.cuda.MemPool] | None = None
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._failed, self._full = 0, False
        self.made = 0
        """Number of graphs made so far."""

    def replay_of(self, start: Start) -> Start | None:
        """A function that launches the graph of ``start``, or ``None`` if none can be made; the log says why."""
        if self._failed >= MOST_FAILED:
            return None
        if len(self._graphs) >= MOST_GRAPHS:
            if not self._full:
                log.warning(
                    "overlap_inductor: %d CUDA graphs hold launches of sites; calls of further sites take the host"
                    " longer",
                    MOST_GRAPHS,
                )
            self._full = True
            return None
        inference = torch.is_inference_mode_enabled()
        try:
            graph = self._thread.submit(self._captured, start, inference).result()
        except Exception as error:  # noqa: BLE001
            # Nothing has run, and launches one by one give the same result. So no error of a capture may end a model or
            # leave peers waiting.
            self._failed += 1
            log.warning(
                "overlap_inductor: the launches of a site could not be captured into a CUDA graph, and are started one"
                " by one (%s)",
                error,
            )
            return None
        self.made += 1
        self._graphs.add(graph)
        index = self._device.index
        return lambda: graph.launch(raw_stream(index))

    def _captured(self, start: Start, inference: bool) -> Graph:
        torch.cuda.set_device(self._device)
        # This thread begins outside inference mode, but uses the caller's tensors. Outside that mode, gradients would
        # be on.
        with torch.inference_mode(inference), torch.no_grad():
            if self._place is None:
                self._place = self._prepared()
            stream, pool = self._place
            with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                return Graph(start, stream.cuda_stream)

    def _prepared(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
        """The stream and the memory pool of captures. Also loads the vendor's library on this thread, which would end a
        capture."""
        # Makes the device's context this thread's.
        torch.cuda.current_stream(self._device).query()
        stream, pool = own_stream(self._device), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
            small = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
            torch.mm(small, small)
        return stream, pool


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The device's recorder, made at first use."""
    return Recorder(device)

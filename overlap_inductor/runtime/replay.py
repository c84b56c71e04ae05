"""The launches of a call as one CUDA graph, replayed when the call comes again with everything where it was.

A call of schedule ``chunked`` is 10 to 80 launches, for which the host took 240 to 690 us (4 H200s, a slow host); a
replay of the same took 13 to 62, and one of a single kernel 3 to 6. Compiled models allocate in the same order step
after step, so a site's tensors soon lie where they lay before. A graph takes about 100 KiB of the device.

Contract. ``launched(launch, what, tensors, start, replays, copied)``: ``start()`` launches on the current stream, and
on streams that it forks and joins, work that depends on ``what``, on the layouts and addresses of ``tensors``, on what
allocations those are of that copies read or write (``copied``), and on nothing else that changes. ::

    first time with these       start()
    second time                 capture start(), replay it; start() where that cannot be done
    later                       replay it
    other allocations           drop the site's graphs: as the first time
    never replayed              start(): not ``replays``, inside the user's capture, on a CPU, with one hardware queue,
                                or when there are too many graphs

Why that is right. Of what differs from call to call nothing is baked into a graph but what its key says: signals take
their number from device memory, as in a graph that a user captures; kernels, slots and fault memory outlive it.
Everything has been loaded by the first call, so a capture waits for nothing on the device; what making a graph may wait
for are calls before this one, for which no peer needs this one. Graphs share the vendor's workspace, since calls of a
rank run one after the other on its GPU (``runtime.call_order``, which also keeps two threads from using a site's graphs
at a time).

Why allocations. A kernel is given addresses, and does not care what lies there. A copy in a graph is bound to the
allocation that it was captured with: where the program has given that back (``torch.cuda.empty_cache()``, which
``torch.cuda.graph`` calls, too) and another one came to lie at the same address, ``cuGraphLaunch`` fails, with
``CUDA_ERROR_INVALID_VALUE``, or the copy faults (driver 580; not where the new one begins where the old one did, nor in
the allocator's expandable segments).

Forward progress. Launched one by one, sends stand before waits in every queue of the device. In a graph there is no
order but that of its edges, and its branches run beside each other: two, which take two queues (with
``CUDA_DEVICE_MAX_CONNECTIONS=1`` nothing is replayed), or three where copies take turns (which they do with three
queues and more). (Copies of a graph are copy engines', those of flags, too: ``tests.gpu.check_stress`` on driver 580.)

Captures happen on a thread of their own, on streams that are nobody else's, with memory of a pool of their own: the
vendor's library has a workspace for each thread and stream, and one that was taken from the pool of a user's graph, or
shared with a user's matmul, would be overwritten.
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
"""Of a device: 200 MiB."""
MOST_OF_A_SITE = 256
"""Graphs of a site, and calls of it that are remembered for having been seen once."""
MOST_FAILED = 16
"""Captures that may fail before no more are tried on a device."""

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
    """Do what ``start`` does, in one launch where that is possible and ``replays`` are wanted. ``what``: hashable; it
    is kept. ``copied``: those of ``tensors`` that copies may read or write, the vendor's library's own among them.

    Raises:
        RuntimeError: a graph that has been launched before could not be launched; the group is aborted. And whatever
            ``start`` raises.
    """
    device = launch.slot.calls.device
    if not replays or device.type != "cuda" or symmetric.capturing() or symmetric.one_queue():
        start()
        return
    key = (what, *[None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
    try:
        allocations = tuple([driver.allocation(t.data_ptr()) for t in copied if t is not None]) if copied else ()
    except RuntimeError as error:
        # (Nobody could say whether it is the memory that a graph was captured with.)
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
        # What was given back was not this tensor's alone.
        launch.replays.clear()
        launch.seen.clear()
    seen = launch.seen.get(key)
    if seen is None or seen[0] != allocations:
        # (Not seen where it fails: a capture must find everything loaded.)
        start()
        if seen is None and len(launch.seen) >= MOST_OF_A_SITE:
            del launch.seen[next(iter(launch.seen))]
        launch.seen[key] = allocations, True
    elif not seen[1] or not _first_replay(launch, key, allocations, start, device):
        start()


@functools.cache
def _say_unknown(error: str) -> None:
    """Once, whatever the address."""
    log.warning(
        "overlap_inductor: the driver does not know the memory of a site's tensors, so its launches are started one by"
        " one (%s)",
        error,
    )


def _first_replay(launch: Launch, key: object, allocations: Allocations, start: Start, device: torch.device) -> bool:
    """Capture and launch; whether that was done. If not, the call is not captured again for as long as it is
    remembered."""
    # (No graph goes for another: a site with more calls in turn would make each of them again and again.)
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
    """Makes graphs of what is launched on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "overlap_inductor captures")
        self._place: tuple[torch.cuda.Stream, torch.cuda.MemPool] | None = None
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._failed, self._full = 0, False
        self.made = 0
        """Graphs made until now."""

    def replay_of(self, start: Start) -> Start | None:
        """What launches the graph of ``start``; ``None`` where none can be made, which the log says."""
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
            # Nothing has run, whatever it was; and launches one by one are as right, so that this must not end a model,
            # nor leave peers waiting.
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
        # (A thread begins outside inference mode, and the tensors are the caller's. Leaving that mode switches
        # gradients on.)
        with torch.inference_mode(inference), torch.no_grad():
            if self._place is None:
                self._place = self._prepared()
            stream, pool = self._place
            with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                return Graph(start, stream.cuda_stream)

    def _prepared(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
        """The stream and the memory. The vendor's library is made ready on this thread: that would end a capture."""
        # (From a first use on, the device's context is this thread's.)
        torch.cuda.current_stream(self._device).query()
        stream, pool = own_stream(self._device), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
            small = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
            torch.mm(small, small)
        return stream, pool


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The device's, made on first use."""
    return Recorder(device)

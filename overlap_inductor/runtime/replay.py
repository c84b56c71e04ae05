# SPDX-License-Identifier: Apache-2.0
"""Replays all launches of a call as one CUDA graph if the program makes the same call again with its tensors at the
same addresses.

A call of schedule ``chunked`` has 10 to 80 launches. Starting them took 240 to 690 us of host time (4 H200s, a slow
host). A replay of the same call took 13 to 62 us. A replay of a call with a single kernel took 3 to 6 us. A compiled
model allocates in the same order at every step, so a site's tensors soon get the same addresses again. A graph takes
about 100 KiB of device memory.

Contract. ``launched(launch, what, tensors, start, replays, copied)``: ``start()`` launches work on the current stream,
and on streams that it forks and joins. The work may depend on ``what``, on the layouts and addresses of ``tensors``,
and on the allocations that hold the tensors in ``copied``. It may depend on nothing else that changes between calls. ::

    first call                  start()
    second call                 capture start() and replay the graph; start() if the capture fails
    later calls                 replay the graph
    allocations have changed    drop the site's graphs, then continue as for a first call
    no replay is possible       start() at every call

No replay is possible if ``replays`` is False, if the user captures the call, on a CPU, or with one hardware queue. It
is also not possible if the driver does not know an allocation, if there are too many graphs, or after a failed capture.

Why this is correct. A captured graph fixes only the values in its key. All other values are read at replay. The number
of the call, which its signals carry, is read from device memory, as in a graph that a user captures. Kernels, slots and
fault memory outlive the graph. The first call has loaded every kernel, so a capture waits for nothing on the device.
Instantiating a graph may wait for earlier calls. This wait ends, because earlier calls end even if this call has not
started on any rank. All graphs can share one workspace of the vendor's matmul library, because ``runtime.call_order``
runs a rank's calls one after the other on its GPU. For the same reason, no two threads use a site's graphs at the same
time.

Why allocations are compared. A kernel in a graph uses plain addresses, whatever allocation these belong to. A copy in a
graph is bound to the allocation with which it was captured. The program may free that allocation
(``torch.cuda.empty_cache()``, which ``torch.cuda.graph`` also calls), and a new allocation may cover the same address.
Then ``cuGraphLaunch`` fails with ``CUDA_ERROR_INVALID_VALUE``, or the copy faults. (Seen with driver 580. It does not
happen if both allocations begin at the same address, or in expandable segments of torch's allocator.)

Forward progress. When launches are started one by one, sends precede waits in every hardware queue of the device. In a
graph, only edges order the nodes, and its branches run at the same time. A call's graph has two branches and needs two
queues, so nothing is replayed with ``CUDA_DEVICE_MAX_CONNECTIONS=1``. If copies take turns, the graph has three
branches. Copies take turns only where there are three queues or more. A graph's copies run on copy engines, including
the copies that set flags (``tests.gpu.check_stress`` on driver 580). So the copies need no SM, and kernels that wait on
the SMs do not hold them up.

Captures run on their own thread, with a stream and a memory pool that nothing else uses. The vendor's matmul library
has one workspace for each thread and stream, and a graph keeps the address of the workspace with which it was captured.
So nothing but these graphs may write to this workspace. A workspace of the user's thread would be unsafe. A user's
matmul may also write to it, or it may lie in the memory pool of a user's graph.
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
"""The largest number of graphs on one device. Together they take 200 MiB."""
MOST_OF_A_SITE = 256
"""The largest number of graphs of one site, and of calls of one site that are remembered after their first run."""
MOST_FAILED = 16
"""Failed captures on one device after which no further capture is tried."""

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
    """Run ``start``, or replay its launches as one graph (see the contract above).

    Args:
        launch: the site's launch. Its ``seen`` and ``replays`` are read and updated.
        what: hashable; everything that the launches depend on besides ``tensors``. It is kept as a part of a key.
        tensors: the tensors that the launches read or write, on the launch's device. ``None`` for an absent tensor.
        start: queues the launches on the current stream.
        replays: whether the call may be replayed.
        copied: the members of ``tensors`` that copies may read or write. This includes copies by the vendor's matmul
            library.

    Raises:
        RuntimeError: a graph that was launched before could not be launched again. The group has been aborted.
        Exception: what ``start`` raises.
    """
    device = launch.slot.calls.device
    if not replays or device.type != "cuda" or symmetric.capturing() or symmetric.one_queue():
        start()
        return
    key = (what, *[None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
    try:
        allocations = tuple([driver.allocation(t.data_ptr()) for t in copied if t is not None]) if copied else ()
    except RuntimeError as error:
        # Without the number of the allocation, it is unknown whether a graph was captured with this memory.
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
        # The program has freed an allocation of this call, and probably also allocations of the site's other calls.
        launch.replays.clear()
        launch.seen.clear()
    seen = launch.seen.get(key)
    if seen is None or seen[0] != allocations:
        # The call is remembered only if it succeeds, because a capture needs every kernel to be loaded.
        start()
        if seen is None and len(launch.seen) >= MOST_OF_A_SITE:
            del launch.seen[next(iter(launch.seen))]
        launch.seen[key] = allocations, True
    elif not seen[1] or not _first_replay(launch, key, allocations, start, device):
        start()


@functools.cache
def _say_unknown(error: str) -> None:
    """Warn once for each ``error``, which names no address."""
    log.warning(
        "overlap_inductor: the CUDA driver does not know the allocation of a site's tensor, so the site's launches are"
        " started one by one (%s)",
        error,
    )


def _first_replay(launch: Launch, key: object, allocations: Allocations, start: Start, device: torch.device) -> bool:
    """Capture a call and launch its graph. Returns False if either failed, or if a limit was reached. The call is then
    not captured again as long as ``launch.seen`` holds it."""
    # A new graph never replaces an older one. Otherwise, a site that alternates between more calls than the limit would
    # capture each call again and again.
    replay = recorder(device).replay_of(start) if len(launch.replays) < MOST_OF_A_SITE else None
    if replay is not None:
        try:
            replay()
        except RuntimeError as error:
            log.warning(
                "overlap_inductor: the CUDA graph of a site's launches cannot be launched, so the launches are started"
                " one by one (%s)",
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
        """Capture ``start``. Returns a function that launches the graph on the current stream, or ``None`` if there is
        no graph: the capture failed, or a limit was reached.

        Logs each capture that fails. Logs the limit ``MOST_GRAPHS`` when it is first reached.
        """
        if self._failed >= MOST_FAILED:
            return None
        if len(self._graphs) >= MOST_GRAPHS:
            if not self._full:
                log.warning(
                    "overlap_inductor: %d CUDA graphs hold launches of sites, and no more are made; the launches of"
                    " further calls are started one by one, which takes more host time",
                    MOST_GRAPHS,
                )
            self._full = True
            return None
        inference = torch.is_inference_mode_enabled()
        try:
            graph = self._thread.submit(self._captured, start, inference).result()
        except Exception as error:  # noqa: BLE001
            # A capture runs nothing, and the launches give the same result when they are started one by one. So a
            # failed capture must neither end the program nor leave peers waiting.
            self._failed += 1
            log.warning(
                "overlap_inductor: the launches of a site could not be captured into a CUDA graph, so they are started"
                " one by one (%s)",
                error,
            )
            return None
        self.made += 1
        self._graphs.add(graph)
        index = self._device.index
        return lambda: graph.launch(raw_stream(index))

    def _captured(self, start: Start, inference: bool) -> Graph:
        torch.cuda.set_device(self._device)
        # The caller's tensors need the caller's inference mode, which is set for each thread. Outside inference mode, a
        # new thread records gradients. ``no_grad`` turns this off.
        with torch.inference_mode(inference), torch.no_grad():
            if self._place is None:
                self._place = self._prepared()
            stream, pool = self._place
            with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                return Graph(start, stream.cuda_stream)

    def _prepared(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
        """Make the stream and the memory pool of captures. Also load the vendor's matmul library on this thread,
        because loading it during a capture would end the capture."""
        # Makes the device's context current on this thread.
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

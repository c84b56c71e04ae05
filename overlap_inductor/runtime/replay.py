# SPDX-License-Identifier: Apache-2.0
"""Replays all launches of a call as one CUDA graph, if the program repeats the call with its tensors at the same
addresses.

A call of schedule ``chunked`` has 10 to 80 launches. They took 240 to 690 us of host time, and a replay took 13 to 62
us (slow host, 4 H200s).

Contract. ``launched(launch, what, tensors, start, replays, copied)``: ``start()`` launches work on the current stream,
and on streams that it forks and joins. ``what`` is a hashable value from the caller. The work may depend on
``what``, on the layouts and addresses of ``tensors``, and on the allocations that hold the tensors in ``copied``. It
may depend on nothing else that changes between calls. ::

    first call                  start()
    second call                 capture start() and replay the graph; start() if the capture fails
    later calls                 replay the graph
    allocations have changed    drop the site's graphs, then continue as for a first call
    no replay is possible       start() at every call

Why this is correct. A captured graph fixes ``what``, and the layouts and addresses of ``tensors``. A call replays the
graph only if ``what``, layouts and addresses are equal to the captured ones. Kernels read the number of the call from
device memory. Kernels, the site's part of the workspace, and fault memory outlive the graph. The first call has loaded
every kernel, so a capture waits for nothing on the device. A rank's calls run one after the other on its GPU
(``runtime.call_order``). So graphs can share one workspace of the vendor's matmul library.

Why allocations are compared. A copy in a graph is bound to the allocation with which it was captured. If the program
frees this allocation, a new one may cover the same address. ``cuGraphLaunch`` then fails with
``CUDA_ERROR_INVALID_VALUE``, or the copy faults (seen with driver 580).

Forward progress. In a graph, only edges order the nodes, and its branches run at the same time. A call's graph has two
branches and needs two hardware queues, so nothing is replayed with ``CUDA_DEVICE_MAX_CONNECTIONS=1``. If copies take
turns, there are three branches. Copies take turns only with three queues or more. A graph's copies run on copy engines
(``tests.gpu.check_stress`` on driver 580), so waiting kernels do not hold them up.

Captures run on their own thread, with their own stream and memory pool. The vendor's matmul library has one workspace
for each thread and stream, and a graph keeps the workspace's address. So only these graphs write to this workspace.
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
"""The largest number of graphs on one device. A graph takes about 100 KiB of device memory."""
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
        what: hashable; everything that the launches depend on besides ``tensors``.
        tensors: the tensors that the launches read or write, on the launch's device. ``None`` for an absent tensor.
        start: queues the launches on the current stream.
        replays: False to run ``start`` at every call.
        copied: the members of ``tensors`` that copies may read or write, also copies by the vendor's matmul library.

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
        # Without the allocation's number, a graph that was captured with other memory would go unnoticed.
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
        # The site's other calls have probably lost their allocations, too.
        launch.replays.clear()
        launch.seen.clear()
    seen = launch.seen.get(key)
    if seen is None or seen[0] != allocations:
        # The call is remembered only after ``start`` succeeded, because a capture needs every kernel to be loaded.
        start()
        if seen is None and len(launch.seen) >= MOST_OF_A_SITE:
            del launch.seen[next(iter(launch.seen))]
        launch.seen[key] = allocations, True
    elif not seen[1] or not _first_replay(launch, key, allocations, start, device):
        start()


@functools.cache
def _say_unknown(error: str) -> None:
    """Warn once for each text ``error``. The text must name no address: each new address would cause a new warning."""
    log.warning(
        "overlap_inductor: the CUDA driver does not know the allocation of a site's tensor, so the site's launches are"
        " started one by one (%s)",
        error,
    )


def _first_replay(launch: Launch, key: object, allocations: Allocations, start: Start, device: torch.device) -> bool:
    """Capture a call and launch its graph. Returns False if this fails, or if a limit was reached. The call is then not
    captured again as long as ``launch.seen`` holds it."""
    # A new graph never replaces an older one. Otherwise a site with too many calls would capture again and again.
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
        """Capture ``start``. Returns a function that launches the graph on the current stream, or ``None`` if the
        capture failed or a limit was reached. Logs each failure, and the limit ``MOST_GRAPHS`` once."""
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
            # A capture runs nothing, and the launches can be started one by one. So a failed capture must not end the
            # program.
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
        # Inference mode is set for each thread. Outside inference mode, a new thread would record gradients.
        with torch.inference_mode(inference), torch.no_grad():
            if self._place is None:
                self._place = self._prepared()
            stream, pool = self._place
            with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
                return Graph(start, stream.cuda_stream)

    def _prepared(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
        """Make the stream and the memory pool of captures, and load the vendor's matmul library on this thread. Loading
        it during a capture would end the capture."""
        # This query makes the device's context current on this thread.
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

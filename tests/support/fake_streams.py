# SPDX-License-Identifier: Apache-2.0
"""Simulates, without a GPU, the order in which CUDA runs the work of streams, events, captures and graphs.

The fakes record queued work and raise errors where CUDA does. ``run`` plays the queues of several ranks.

- A stream runs its queue in order.
- Recording an event marks a point in a stream. If the event is recorded again, waits that are already queued still
  refer to the earlier mark.
- A stream that waits for an event of a running capture joins the capture.
- A wait is an error if the event belongs to a capture that has ended.
- A wait in a capture is an error if the event was recorded outside.
- A *call* is work that all ranks do together. It ends when every rank has begun it. A GPU runs one call at a time,
  while its other streams go on.
- A *recv* waits until a *send* of the same name has run on any rank. Each send lets one recv run.
- A replay of a graph queues only its calls: on the current stream, in the order of capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch

from overlap_inductor.runtime import driver
from overlap_inductor.torch_compat import symmetric

CUDA = torch.device("cuda", 0)


@dataclass(eq=False)
class Mark:
    """The point in a stream that an event marks."""

    capture: int


@dataclass(eq=False)
class Stream:
    gpu: Gpu
    number: int
    queue: list[tuple[str, Any]] = field(default_factory=list)
    capture: int = 0
    device = CUDA

    def wait_event(self, event: Event) -> None:
        if event.mark is None:
            return
        if event.mark.capture and not self.capture:
            if event.mark.capture not in self.gpu.captures:
                raise RuntimeError("CUDA error: dependency created on an event of a capture that is over")
            self.capture = event.mark.capture
        if self.capture != event.mark.capture:
            raise RuntimeError(
                "CUDA error: dependency created on uncaptured work in another stream (cudaErrorStreamCaptureIsolation)"
            )
        self.put("wait", event.mark)

    def put(self, kind: str, what: Any) -> None:
        (self.gpu.captures[self.capture].queue if self.capture else self.queue).append((kind, what))


class Event:
    gpu: Gpu

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = Mark(stream.capture)
        stream.put("mark", self.mark)


class Graph:
    """A fake of ``torch.cuda.CUDAGraph``. It holds the work of all streams of the capture, in the order of capture."""

    gpu: Gpu

    def __init__(self) -> None:
        self.queue: list[tuple[str, Any]] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        stream = self.gpu.current
        stream.capture = next(self.gpu.numbers)
        self.gpu.captures[stream.capture] = self
        self.queue = []

    def capture_end(self) -> None:
        for number in [n for n, graph in self.gpu.captures.items() if graph is self]:
            del self.gpu.captures[number]
            for stream in self.gpu.streams:
                if stream.capture == number:
                    stream.capture = 0

    def replay(self) -> None:
        for kind, what in self.queue:
            if kind == "call":
                self.gpu.current.put(kind, what)


class Gpu:
    """The fake GPU of one rank. ``use`` replaces functions of ``torch.cuda``, ``symmetric`` and ``driver`` by functions
    of this GPU."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.numbers = itertools.count(1)
        self.captures: dict[int, Graph] = {}
        self.beside_captures = 0
        self.current = self.stream()

    def stream(self) -> Stream:
        self.streams.append(Stream(self, 16 * len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def asked_beside_captures(self, device: torch.device) -> Iterator[None]:
        self.beside_captures += 1
        try:
            yield
        finally:
            self.beside_captures -= 1

    def use(self, monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
        """Make this GPU the one that the code under test sees. Returns the class of its CUDA graphs."""
        graphs = type(
            "Graph",
            (Graph,),
            {"gpu": self, **{name: getattr(Graph, name) for name in ("capture_begin", "capture_end", "replay")}},
        )
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(symmetric, "stream_number", lambda device: self.current.number)
        monkeypatch.setattr(symmetric, "current_stream_number", lambda: self.current.number)
        monkeypatch.setattr(driver, "beside_captures", self.asked_beside_captures)
        monkeypatch.setattr(symmetric, "capturing", lambda: self.current.capture != 0)
        monkeypatch.setattr(
            driver, "capture_number", lambda raw: next(s.capture for s in self.streams if s.number == raw)
        )
        return graphs


def run(gpus: Sequence[Gpu]) -> list[list[tuple[str, Any]]]:
    """Play all queues. Returns, for each rank, the work that could not run: on GPUs, it would wait forever."""
    queues = [[list(stream.queue) for stream in gpu.streams] for gpu in gpus]
    done: set[Mark] = set()
    begun: list[tuple[int, str] | None] = [None] * len(gpus)
    sent: dict[str, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, streams in enumerate(queues):
            for number, queue in enumerate(streams):
                while queue:
                    kind, what = queue[0]
                    if kind == "call":
                        if begun[rank] is None:
                            begun[rank], moved = (number, what), True
                        break
                    if kind == "wait" and what not in done or kind == "recv" and not sent.get(what):
                        break
                    if kind == "mark":
                        done.add(what)
                    elif kind == "send":
                        sent[what] = sent.get(what, 0) + 1
                    elif kind == "recv":
                        sent[what] -= 1
                    queue.pop(0)
                    moved = True
        if all(begun) and len({call[1] for call in begun if call is not None}) == 1:
            for rank, call in enumerate(begun):
                if call is not None:
                    queues[rank][call[0]].pop(0)
                begun[rank] = None
            moved = True
    return [[left for queue in streams for left in queue] for streams in queues]

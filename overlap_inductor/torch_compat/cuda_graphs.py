# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of torch and of Inductor.

``observe`` tells an observer when torch captures or replays a CUDA graph, by wrapping three methods of torch's graph
class. Graphs that the driver or another library captures and replays are not observed.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager
from typing import Any
from typing import Protocol


def captured_by_inductor() -> bool:
    """Whether Inductor is set to run the graph that it compiles now as a CUDA graph, for example by
    ``mode="reduce-overhead"``."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def reset_trees() -> None:
    """Forget the CUDA graphs that Inductor has captured, if Inductor's module for them is loaded."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


class Observer(Protocol):
    """What ``observe`` calls. No method may raise for a graph that has nothing to do with this package."""

    def begun(self, graph: Any) -> None:
        """The capture of the current stream into ``graph`` has begun."""
        ...

    def ended(self, graph: Any) -> None:
        """The capture into ``graph`` has ended or failed."""
        ...

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        """The context in which ``graph`` is replayed on the current stream."""
        ...


def observe(graphs: Any, observer: Observer) -> None:
    """Tell ``observer`` of every graph of the class ``graphs`` (``torch.cuda.CUDAGraph``). Call this once per class."""
    begin, end, launch = graphs.capture_begin, graphs.capture_end, graphs.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *arguments: Any, **named: Any) -> Any:
        result = begin(self, *arguments, **named)
        observer.begun(self)
        return result

    @functools.wraps(end)
    def capture_end(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return end(self, *arguments, **named)
        finally:
            observer.ended(self)

    @functools.wraps(launch)
    def replay(self: Any, *arguments: Any, **named: Any) -> Any:
        with observer.replaying(self):
            return launch(self, *arguments, **named)

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, replay

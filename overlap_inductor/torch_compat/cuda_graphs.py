"""What torch's CUDA graphs tell us: that a capture has begun or ended, and that a graph is about to be replayed.

torch has no hook for that, so the three methods of its graph class are wrapped, once a process. What they do, take and
return stays as it is. Graphs that are captured and replayed by other means (the driver itself, another library) are not
seen here.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from typing import Protocol


class Observer(Protocol):
    """What is told. No method may raise: the program's graph may have nothing to do with this package."""

    def begun(self, graph: Any) -> None:
        """The current stream's capture into ``graph`` has just begun."""
        ...

    def ended(self, graph: Any) -> None:
        """The capture into ``graph`` is over, or was given up."""
        ...

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        """What is around a replay of ``graph`` on the current stream."""
        ...


def observe(graphs: Any, observer: Observer) -> None:
    """Tell ``observer`` of every graph of the class ``graphs`` (``torch.cuda.CUDAGraph``), from now on."""
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

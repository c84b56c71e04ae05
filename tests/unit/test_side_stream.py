# SPDX-License-Identifier: Apache-2.0
"""When the side stream and the current stream wait for each other. Streams and events are fakes."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.runtime import side_stream
from overlap_inductor.runtime.side_stream import SideStream

CUDA = torch.device("cuda", 0)


class _Stream:
    device = CUDA

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_event(self, event: _Event) -> None:
        self.said.append(f"{self.name} waits for {event.of}")


class _Event:
    of = ""

    def record(self, stream: _Stream) -> None:
        self.of = stream.name


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    current = [_Stream("current", found)]
    monkeypatch.setattr(side_stream, "own_stream", lambda device, priority: _Stream("side", found))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    return found


def test_the_streams_wait_for_each_other_at_fork_and_join(said: list[str]) -> None:
    side = SideStream(CUDA)
    with side:
        assert torch.cuda.current_stream(CUDA) is side._stream
    side.join()
    assert said == ["side waits for current", "current waits for side"]


def test_a_stream_that_was_not_entered_is_not_waited_for(said: list[str]) -> None:
    """In a capture, an error may be raised before the side stream is entered. If ``join`` then waited for the side
    stream, CUDA's error about a stream outside the capture would hide the first error."""
    side = SideStream(CUDA)
    side.join()
    assert said == []
    with side:
        pass
    side.join()
    side.join()
    assert said == ["side waits for current", "current waits for side"]

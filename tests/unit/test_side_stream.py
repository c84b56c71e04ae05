# SPDX-License-Identifier: Apache-2.0
"""When the side stream and the current stream wait for each other. Streams and events are fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overlap_inductor.runtime import side_stream
from overlap_inductor.runtime.side_stream import SideStream

CUDA = torch.device("cuda", 0)
CURRENT, SIDE = (10, 0, 1), (20, 0, 1)
NAMES = {10: "current", 20: "side"}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    places = [CURRENT]

    class Mark:
        of = ""

        def record(self, stream: int) -> None:
            self.of = NAMES[stream]

        def hold(self, stream: int) -> None:
            found.append(f"{NAMES[stream]} waits for {self.of}")

    side = SimpleNamespace(stream_id=20, device_index=0, device_type=1, cuda_stream=20)
    monkeypatch.setattr(side_stream, "own_stream", lambda device, priority: side)
    monkeypatch.setattr(side_stream, "Mark", Mark)
    monkeypatch.setattr(side_stream, "current_place", lambda gpu: places[-1])
    monkeypatch.setattr(side_stream, "set_place", places.append)
    monkeypatch.setattr(side_stream, "raw_stream", lambda gpu: places[-1][0])
    return found


def test_the_streams_wait_for_each_other_at_fork_and_join(said: list[str]) -> None:
    side = SideStream(CUDA)
    with side:
        assert side_stream.current_place(0) == SIDE
    assert side_stream.current_place(0) == CURRENT
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

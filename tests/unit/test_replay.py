"""When a call is launched as it is, and when as a CUDA graph: with a recorder that only notes what it is given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import replay
from overlap_inductor.transports.replay import Recorder
from overlap_inductor.transports.replay import launched


class Noted:
    """A launch on a GPU, and what was done there: ``start`` by the host, ``graph`` in one launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graphs: bool = True, device: str = "cuda") -> None:
        self.launch: Any = SimpleNamespace(slot=SimpleNamespace(calls=SimpleNamespace(device=torch.device(device))), seen=set(), replays={})
        self.done: list[str] = []
        self.captures = 0

        def replay_of(start: Callable[[], None]) -> Callable[[], None] | None:
            self.captures += 1
            return (lambda: self.done.append("graph")) if graphs else None

        monkeypatch.setattr(replay, "recorder", lambda device: SimpleNamespace(replay_of=replay_of))
        monkeypatch.setattr(symmetric, "capturing", lambda: self.inside)
        self.inside = False

    def call(self, *tensors: torch.Tensor | None, what: object = "gather", replays: bool = True) -> str:
        launched(self.launch, what, tensors, lambda: self.done.append("start"), replays)
        return self.done[-1]


def test_the_second_call_with_everything_in_its_place_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a, b = Noted(monkeypatch), torch.zeros(4, 4), torch.zeros(4)
    assert [noted.call(a, b, None) for _ in range(4)] == ["start", "graph", "graph", "graph"]
    assert noted.captures == 1


def test_whatever_differs_makes_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4, 4)
    others: list[tuple[torch.Tensor | None, ...]] = [
        (a, None), (a[1:],), (a.t(),), (a.view(2, 8),), (a.view(torch.int32),), (torch.zeros(4, 4),), (a, a), (None,),
    ]  # fmt: skip
    noted.call(a)
    noted.call(a)
    assert [noted.call(*tensors) for tensors in others] == ["start"] * len(others)
    assert noted.call(a, what="scatter") == "start"
    assert noted.call(a) == "graph"


def test_a_users_capture_a_cpu_and_the_switch_launch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(4)
    elsewhere = Noted(monkeypatch, device="cpu")
    assert [elsewhere.call(a) for _ in range(3)] == ["start"] * 3
    noted = Noted(monkeypatch)
    noted.inside = True
    assert [noted.call(a) for _ in range(3)] == ["start"] * 3
    noted.inside = False
    assert [noted.call(a, replays=False) for _ in range(3)] == ["start"] * 3
    assert elsewhere.captures == noted.captures == 0
    # (What the user's capture launched has not been launched by the host.)
    assert [noted.call(a) for _ in range(2)] == ["start", "graph"]


def test_a_call_that_fails_is_not_captured_next(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4)

    def fail() -> None:
        raise ValueError("no kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            launched(noted.launch, "gather", [a], fail, True)
    assert noted.captures == 0


def test_without_a_graph_it_is_launched_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch, graphs=False), torch.zeros(4)
    assert [noted.call(a) for _ in range(3)] == ["start"] * 3


def test_addresses_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, memory = Noted(monkeypatch), torch.zeros(2 * replay.MOST_SEEN)
    for i in range(2 * replay.MOST_SEEN):
        assert noted.call(memory[i:]) == "start"
        assert len(noted.launch.seen) <= replay.MOST_SEEN


def test_no_more_graphs_than_the_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(Recorder, "_captured", lambda self, start, inference: SimpleNamespace())
    recorder = Recorder(torch.device("cuda", 0))
    with caplog.at_level(logging.INFO, "overlap_inductor"):
        assert [recorder.replay_of(lambda: None) is None for _ in range(4)] == [False, False, True, True]
    assert "2 CUDA graphs hold launches of sites" in caplog.text


def test_a_capture_that_fails_is_said_ends_nothing_and_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(self: Recorder, start: object, inference: bool) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "_captured", fail)
    recorder = Recorder(torch.device("cuda", 0))
    assert [recorder.replay_of(lambda: None) for _ in range(9)] == [None] * 9
    assert len(caplog.records) == replay.MOST_FAILED and "not permitted" in caplog.text

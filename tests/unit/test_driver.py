# SPDX-License-Identifier: Apache-2.0
"""Calls to CUDA's driver, their order and their errors. A fake library records the calls, and can make one fail."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.runtime import driver


class Library:
    """Records the calls of its functions. The function that ``fails`` names returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            self.arguments[name] = arguments
            if name == self.fails:
                return 700
            for argument in arguments:
                if hasattr(argument, "_obj"):
                    argument._obj.value = 1234 if name == "cuStreamEndCapture" else 5678
            return 0

        return call


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    def clear() -> None:
        for cached in (driver.copier, driver.plane_copier, driver._library, driver._function):
            cached.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.version, "hip", None)
    return made


def test_a_part_is_copied_on_a_cpu() -> None:
    source, target = torch.arange(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    driver.copier("cpu")(target.data_ptr() + 8, source.data_ptr() + 4, 12, 0)
    assert target.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0, 0]


def test_the_driver_copies_and_its_error_is_raised(library: Library) -> None:
    copy = driver.copier("cuda")
    copy(1 << 40, 2, 12, 3)
    assert library.arguments["cuMemcpyAsync"] == (1 << 40, 2, 12, 3)
    library.fails = "cuMemcpyAsync"
    with pytest.raises(RuntimeError, match=r"cuMemcpyAsync returned CUresult 700, for \(1, 2, 13, 3\)"):
        copy(1, 2, 13, 3)


def test_runs_of_bytes_are_copied_on_a_cpu() -> None:
    source, target = torch.arange(6, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    driver.plane_copier("cpu")(target.data_ptr() + 4, 16, source.data_ptr(), 8, 3, 0)
    assert target.tolist() == [[0, 0, 1, 0], [0, 2, 3, 0], [0, 4, 5, 0]]


def test_the_driver_copies_runs_of_bytes(library: Library) -> None:
    """The structure has the size and the offsets of ``CUDA_MEMCPY2D`` on 64-bit machines."""
    assert ctypes.sizeof(driver._Plane) == 128
    found: list[Any] = []

    def copy(wanted: Any, stream: int) -> int:
        found.extend([wanted._obj, stream])
        return 0

    library.cuMemcpy2DAsync_v2 = copy
    driver.plane_copier("cuda")(1 << 40, 64, 1 << 41, 16, 5, 3)
    plane, stream = found
    assert (plane.source_memory, plane.source_device, plane.source_pitch) == (4, 1 << 41, 16)
    assert (plane.target_memory, plane.target_device, plane.target_pitch) == (4, 1 << 40, 64)
    assert (plane.width, plane.height, stream) == (16, 5, 3) and not plane.source_x and not plane.target_y
    offsets = {"source_memory": 16, "source_device": 32, "source_pitch": 48, "target_memory": 72, "target_device": 88}
    assert all(getattr(driver._Plane, name).offset == offset for name, offset in offsets.items())


def test_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="this device is 'xpu'. Choose a transport that does not copy"):
        driver.copier("xpu")


def test_an_address_has_its_allocations_number(library: Library) -> None:
    assert driver.allocation(1 << 40) == 5678
    assert library.arguments["cuPointerGetAttribute"][1:] == (7, 1 << 40)
    library.fails = "cuPointerGetAttribute"
    with pytest.raises(RuntimeError, match="cuPointerGetAttribute returned CUresult 700"):
        driver.allocation(1)


def test_a_capture_has_a_number(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    assert driver.capture_number(77) == 0, "status 5678 does not mean that the stream is being captured"
    monkeypatch.setattr(driver, "CAPTURING", 5678)
    assert driver.capture_number(77) == 5678
    assert library.arguments["cuStreamGetCaptureInfo_v2"][0] == 77 and library.arguments["cuStreamGetCaptureInfo_v2"][
        3:
    ] == (None, None, None)
    library.fails = "cuStreamGetCaptureInfo_v2"
    with pytest.raises(RuntimeError, match="cuStreamGetCaptureInfo_v2 returned CUresult 700"):
        driver.capture_number(77)


def test_beside_captures_sets_and_restores_the_threads_mode(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    modes: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def exchange(argument: Any) -> int:
        argument._obj.value, given = 5, argument._obj.value
        modes.append(given)
        return 0

    library.cuThreadExchangeStreamCaptureMode = exchange
    with pytest.raises(ValueError, match="while asking"), driver.beside_captures(torch.device("cuda", 1)):
        assert modes == [driver.THREAD_LOCAL]
        raise ValueError("while asking")
    assert modes == [driver.THREAD_LOCAL, 5], "afterwards the thread must have its old mode"


def test_a_graph_is_captured_launched_and_destroyed(library: Library) -> None:
    graph = driver.Graph(lambda: library.calls.append("start"), 77)
    graph.launch(78)
    assert library.calls == [
        "cuStreamBeginCapture_v2", "start", "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphLaunch",
    ]  # fmt: skip
    assert library.arguments["cuStreamBeginCapture_v2"] == (77, driver.THREAD_LOCAL)
    assert (
        library.arguments["cuGraphInstantiateWithFlags"][1].value
        == library.arguments["cuGraphDestroy"][0].value
        == 1234
    )
    assert library.arguments["cuGraphLaunch"] == (5678, 78)
    del graph
    gc.collect()
    assert library.arguments["cuGraphExecDestroy"][0].value == 5678


@pytest.mark.parametrize("fails", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_a_capture_that_fails_is_an_error_and_leaves_no_graph(library: Library, fails: str) -> None:
    library.fails = fails
    with pytest.raises(RuntimeError, match=f"{fails} returned CUresult 700"):
        driver.Graph(lambda: None, 77)
    assert ("cuGraphDestroy" in library.calls) == (fails == "cuGraphInstantiateWithFlags")
    assert "cuGraphExecDestroy" not in library.calls


def test_a_capture_ends_if_the_captured_work_fails(library: Library) -> None:
    def start() -> None:
        raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        driver.Graph(start, 77)
    assert library.calls == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]

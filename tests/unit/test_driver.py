"""Copies by address: where there is no GPU at once, by the driver elsewhere, whose errors are said."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.transports import driver


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    for cached in (driver.copier, driver._library):
        cached.cache_clear()
    yield
    for cached in (driver.copier, driver._library):
        cached.cache_clear()


def test_a_part_is_copied_where_there_is_no_gpu() -> None:
    source, target = torch.arange(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    driver.copier("cpu")(target.data_ptr() + 8, source.data_ptr() + 4, 12, 0)
    assert target.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0, 0]


def test_the_drivers_call_is_made_and_its_error_said(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Driver:
        class cuMemcpyAsync:  # noqa: N801
            def __new__(cls, *arguments: Any) -> Any:
                calls.append(arguments)
                return 700 if arguments[2] == 13 else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver)
    monkeypatch.setattr(torch.version, "hip", None)
    copy = driver.copier("cuda")
    copy(1 << 40, 2, 12, 3)
    assert calls == [(1 << 40, 2, 12, 3)]
    with pytest.raises(RuntimeError, match="of 13 bytes returned CUresult 700"):
        copy(1, 2, 13, 3)


def test_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="OVERLAP_INDUCTOR_TRANSPORT=sm_push"):
        driver.copier("xpu")

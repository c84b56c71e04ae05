# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from overlap_inductor.runtime import agreement
from overlap_inductor.torch_compat import symmetric
from tests.support.fake_group import fake_group


@pytest.fixture
def two() -> Iterator[None]:
    with fake_group(2), torch.no_grad():
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of plans, because this process is the only rank that publishes one."""
    monkeypatch.setattr(agreement, "require", lambda group, plan: None)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that ranks reach each other's memory, as GPUs of one machine do."""
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)

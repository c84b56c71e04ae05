# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder. Each imports torch when it is used: xdist's main process also loads this file, but runs no
test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def two() -> Iterator[None]:
    import torch

    from tests.support.fake_group import fake_group

    with fake_group(2), torch.no_grad():
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of plans, because this process is the only rank that publishes one."""
    from overlap_inductor.runtime import agreement

    monkeypatch.setattr(agreement, "require", lambda group, plan: None)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that ranks reach each other's memory, as GPUs of one machine do."""
    from overlap_inductor.torch_compat import symmetric

    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fake_group import fake_group


@pytest.fixture
def two() -> Iterator[None]:
    with fake_group(2), torch.no_grad():
        yield

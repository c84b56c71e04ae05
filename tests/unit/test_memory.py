# SPDX-License-Identifier: Apache-2.0
"""How an op's results and chain tokens are allocated: by the generated code's allocator on the current GPU, by
``new_empty`` elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_inductor.torch_compat import memory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests to the allocator of GPU 1, which is the current GPU."""
    found: list[Any] = []
    monkeypatch.setattr(memory, "_on_gpu", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(memory, "_current_gpu", lambda: 1)
    return found


def on_gpu(number: int) -> Any:
    """A fake tensor on GPU ``number``. The tensor's ``new_empty`` returns the arguments of the call."""
    return SimpleNamespace(
        is_cuda=True, get_device=lambda: number, new_empty=lambda *sizes, **keywords: ("new_empty", sizes, keywords)
    )


def test_on_the_current_gpu(asked: list[Any]) -> None:
    memory.rows_like(on_gpu(1), 3, 8, torch.float16)
    memory.token_like(on_gpu(1))
    assert asked == [((3, 8), (8, 1), torch.float16), ((1,), (1,), torch.uint8)]


def test_on_another_gpu_the_tensor_allocates(asked: list[Any]) -> None:
    """The allocator of the generated code takes memory from the current GPU only."""
    rows: Any = memory.rows_like(on_gpu(0), 3, 8, torch.float16)
    token: Any = memory.token_like(on_gpu(0))
    assert (rows, token) == (("new_empty", (3, 8), {"dtype": torch.float16}), ("new_empty", (1,), {})) and not asked


def test_on_a_cpu() -> None:
    rows, token = (
        memory.rows_like(torch.zeros(2), 3, 8, torch.float16),
        memory.token_like(torch.zeros(1, dtype=torch.uint8)),
    )
    assert (rows.shape, rows.stride(), rows.dtype, rows.device.type) == ((3, 8), (8, 1), torch.float16, "cpu")
    assert (token.shape, token.dtype) == ((1,), torch.uint8)

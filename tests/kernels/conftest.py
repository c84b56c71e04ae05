# SPDX-License-Identifier: Apache-2.0
"""Skips the tests of this folder unless kernels run in Triton's interpreter: ``TRITON_INTERPRET=1 pytest
tests/kernels``. ``TRITON_INTERPRET`` must be set before a kernel is defined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.support.warm_kernels  # noqa: F401
    from tests.support import gloo_ranks

    gloo_ranks.PRELOADED.append("tests.support.warm_kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="runs in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels")
                )

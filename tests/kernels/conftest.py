# SPDX-License-Identifier: Apache-2.0
"""Skips the tests of this folder unless kernels run in Triton's interpreter: ``TRITON_INTERPRET=1 pytest
tests/kernels``. The variable must be set before a kernel is defined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Rewrite the kernels for the interpreter, once for all ranks. xdist's main process runs no test, so it does not
    even import torch."""
    if os.environ.get("TRITON_INTERPRET") == "1" and config.getoption("dist", "no") == "no":
        import tests.support.warm_kernels  # noqa: F401
        from tests.support import gloo_ranks

        gloo_ranks.PRELOADED.append("tests.support.warm_kernels")


def _starts_gloo_ranks(item: pytest.Item) -> bool:
    from tests.support import gloo_ranks

    return isinstance(item, pytest.Function) and vars(item.module).get("run_ranks") is gloo_ranks.run_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test that starts gloo ranks keeps two processors busy. So with ``--dist loadgroup``, one worker runs all of
    these tests, one after the other."""
    for item in items:
        if HERE in item.path.parents and _starts_gloo_ranks(item):
            item.add_marker(pytest.mark.xdist_group("gloo ranks"))
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="runs in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels")
                )

# SPDX-License-Identifier: Apache-2.0
"""Inductor's code of a function whose rings are rewritten, and the order of the steps in it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import overlap_inductor
from tests.support.fake_group import fake_group

WORLD_SIZE = 8
EVENTS = {
    "gather_start.default(": "start",
    "gather_step.default(": "step",
    "exchange_start.default(": "start",
    "exchange_send.default(": "send",
    "exchange_wait.default(": "wait",
    "extern_kernels.mm(": "mm",
    "extern_kernels.addmm(": "mm",
    "extern_kernels.bias_addmm(": "mm",  # autotuning chooses it if it was faster in that run
    "cpp_fused": "pointwise",
    "aten._embedding_bag.default(": "lookup",
    "aten._embedding_bag_backward.default(": "gradient",
}


@contextmanager
def without_kernels() -> Iterator[None]:
    """For tests that read code and no values: Inductor generates code anew, and C++ kernels are not built and do
    nothing. A build takes a second, and a fake group's collectives leave no values to compute with."""
    from torch._inductor.async_compile import AsyncCompile

    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *given: lambda *arguments: None)
    with torch._inductor.config.patch(force_disable_caches=True), unbuilt:
        yield


def lines_of(
    fn: Callable[..., Any], *shapes: tuple[int, ...], world_size: int = WORLD_SIZE, rank: int = 3, **fields: Any
) -> list[str]:
    """The lines of the generated ``call``."""
    from torch._inductor.utils import run_and_get_code

    with fake_group(world_size, rank), torch.no_grad(), without_kernels():
        options = fields.pop("options", None)
        with overlap_inductor.overlap(schedule="ring", **{"sub_chunks": 1, **fields}):
            _, (code,) = run_and_get_code(torch.compile(fn, options=options), *[torch.randn(s) for s in shapes])
    return [line.strip() for line in code[code.index("def call(") :].split("runner = ")[0].splitlines()]


def events(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        found += [event for mark, event in EVENTS.items() if mark in line and not line.startswith(("assert", "#"))]
    return found

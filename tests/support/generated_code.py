# SPDX-License-Identifier: Apache-2.0
"""Inductor's code of a function whose rings are rewritten, and the order of the steps in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def lines_of(
    fn: Callable[..., Any], *shapes: tuple[int, ...], world_size: int = WORLD_SIZE, rank: int = 3, **fields: Any
) -> list[str]:
    """The lines of the generated ``call``."""
    from torch._inductor.utils import run_and_get_code

    with fake_group(world_size, rank), torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        options = fields.pop("options", None)
        with overlap_inductor.overlap(schedule="ring", **{"sub_chunks": 1, **fields}):
            _, (code,) = run_and_get_code(torch.compile(fn, options=options), *[torch.randn(s) for s in shapes])
    return [line.strip() for line in code[code.index("def call(") :].split("runner = ")[0].splitlines()]


def events(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        found += [event for mark, event in EVENTS.items() if mark in line and not line.startswith(("assert", "#"))]
    return found

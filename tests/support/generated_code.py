# SPDX-License-Identifier: Apache-2.0
"""Reads the code that Inductor generates for a function with sites, and the order of the steps in this code."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from typing import Any
from typing import NoReturn
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
    "extern_kernels.bias_addmm(": "mm",  # autotuning chooses this op if it was faster than ``addmm``
    "cpp_fused": "pointwise",
    "_c10d_functional.all_to_all_single.default(": "exchange",
    "_c10d_functional.all_gather_into_tensor.default(": "gather",
    "_c10d_functional.wait_tensor.default(": "wait for it",
    "aten._embedding_bag.default(": "lookup",
    "aten._embedding_bag_backward.default(": "gradient",
    "aten._scaled_dot_product_flash_attention_for_cpu.default(": "attention",
}


@contextmanager
def without_kernels() -> Iterator[None]:
    """For tests that read generated code, but no values. Inductor's caches are off. Functions that do nothing take the
    place of C++ kernels."""
    from torch._inductor.async_compile import AsyncCompile

    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *given: lambda *arguments: None)
    with torch._inductor.config.patch(force_disable_caches=True), unbuilt:
        yield


class _NotRunError(Exception):
    """Ends the first call of a compiled function before the generated code runs."""


def code_of(fn: Callable[..., Any], *arguments: Any) -> str:
    """The code that Inductor generates for ``fn``, which must compile to one graph. The code is not run, because
    buffers would hold arbitrary values without the C++ kernels. An op may refuse such values."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph

    def instead(graph: CompiledFxGraph, inputs: Any) -> NoReturn:
        raise _NotRunError

    codes: list[str] = []
    torch._dynamo.reset()
    with (
        without_kernels(),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
        mock.patch.object(CompiledFxGraph, "__call__", instead),
        suppress(_NotRunError),
    ):
        fn(*arguments)
    (code,) = codes
    return code


def lines_of(
    fn: Callable[..., Any], *shapes: tuple[int, ...], world_size: int = WORLD_SIZE, rank: int = 3, **fields: Any
) -> list[str]:
    """The lines of the generated ``call``."""
    with fake_group(world_size, rank), torch.no_grad():
        options = fields.pop("options", None)
        with overlap_inductor.overlap(**{"schedule": "ring", "sub_chunks": 1, **fields}):
            code = code_of(torch.compile(fn, options=options), *[torch.randn(s) for s in shapes])
    return [line.strip() for line in code[code.index("def call(") :].split("runner = ")[0].splitlines()]


def events(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        found += [event for mark, event in EVENTS.items() if mark in line and not line.startswith(("assert", "#"))]
    return found

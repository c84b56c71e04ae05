# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for credits, end a call, or set its results to NaN after an abort. A peer's credit allows this rank
to write into that peer's workspace."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import torch

from overlap_inductor.kernels.layout import ANNOUNCED
from overlap_inductor.kernels.signals import end_call
from overlap_inductor.kernels.transfer import end_call_and_spoil
from overlap_inductor.kernels.transfer import spoil
from overlap_inductor.kernels.transfer import wait_for_credits
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments


def announced(launch: Launch) -> torch.Tensor:
    """The int32 tensor ``[1]`` of the value that the call's signals carry. The kernel of ``credit_kernel`` sets the
    value."""
    return launch.slot.queues[ANNOUNCED : ANNOUNCED + 1]


def credit_kernel(launch: Launch) -> PreparedKernel:
    """A kernel that blocks the stream until every peer has ended its previous call on ``launch.slot``, the wait times
    out, or the group is aborted. Then it sets ``announced``. The slot is the part of the workspace that the call
    holds."""
    kernel = launch.prepared.get("credits")
    if kernel is None:
        fixed = {**call_arguments(wait_for_credits, launch), "announced": announced(launch)}
        kernel = launch.prepared["credits"] = PreparedKernel(wait_for_credits, 1, {}, fixed, num_warps=1)
    return kernel


def end_kernel(launch: Launch) -> PreparedKernel:
    """A kernel that counts the call as ended and lets the peers write again. Launch it after everything that reads the
    workspace or sends from it."""
    kernel = launch.prepared.get("end")
    if kernel is None:
        fixed = call_arguments(end_call, launch)
        kernel = launch.prepared["end"] = PreparedKernel(end_call, 1, {}, fixed, num_warps=1)
    return kernel


SPOILT_AT_END = ("one", "two", "three")
"""Parameters of ``end_call_and_spoil`` for the first results. Each further result has a ``spoil_kernel``."""
BLOCK = 1024


def _words(result: torch.Tensor) -> int:
    return -(-result.nbytes // 4)


def spoil_kernel(launch: Launch, result: torch.Tensor) -> PreparedKernel:
    """A kernel that sets a result to NaN if the group was aborted (``kernels.transfer.spoil``). The kernel is for
    results of as many int32 words as ``result`` has. Launch it after the result is computed."""
    key = "spoil", _words(result)
    kernel = launch.prepared.get(key)
    if kernel is None:
        fixed = {**call_arguments(spoil, launch), "words": _words(result), "BLOCK": BLOCK}
        kernel = PreparedKernel(spoil, 1, {"result": result}, fixed, num_warps=4)
        launch.remember(key, kernel)
    return kernel


def spoiling_end(launch: Launch, results: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """A function that ends the call as ``end_kernel`` does, and sets its results to NaN if the group was aborted."""
    key = ("spoiling end", *map(_words, results))
    end = launch.prepared.get(key)
    if end is None:
        end = _spoiling_end(launch, results)
        launch.remember(key, end)
    return end


def _spoiling_end(launch: Launch, results: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    others = [spoil_kernel(launch, result) for result in results[len(SPOILT_AT_END) :]]
    missing = max(0, len(SPOILT_AT_END) - len(results))
    at_end = dict(zip(SPOILT_AT_END, [*results, *[None] * missing]))
    fixed = {
        **call_arguments(end_call_and_spoil, launch),
        **{f"words_of_{name}": 0 if result is None else _words(result) for name, result in at_end.items()},
        "BLOCK": BLOCK,
    }
    kernel = PreparedKernel(end_call_and_spoil, 1, at_end, fixed, num_warps=4)

    def end(results: Sequence[torch.Tensor]) -> None:
        for result, spoils in zip(results[len(SPOILT_AT_END) :], others, strict=True):
            spoils(result)
        kernel(*results[: len(SPOILT_AT_END)], *[None] * missing)

    return end

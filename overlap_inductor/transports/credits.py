"""Leave to write into peers' workspace, as launches of their own: waiting for it before a call's first transfer, and
giving it at the call's end; and spoiling results where the group has been aborted (``kernels.transfer.spoil``)."""

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


def announced(launch: Launch) -> torch.Tensor:
    """Word ``[1]`` on the device: the number that signals of the call have, from ``credit_kernel`` on."""
    return launch.slot.queues[ANNOUNCED : ANNOUNCED + 1]


def credit_kernel(launch: Launch) -> PreparedKernel:
    """Lets the stream go on when every peer has ended the slot's call before this one."""
    kernel = launch.prepared.get("credits")
    if kernel is None:
        slot = launch.slot
        fixed = (
            slot.flags.local,
            slot.calls,
            announced(launch),
            launch.faults.stop,
            launch.patience_ns,
            launch.site,
            launch.rank,
            launch.world_size,
        )
        kernel = launch.prepared["credits"] = PreparedKernel(wait_for_credits, 1, (), fixed, num_warps=1)
    return kernel


def end_kernel(launch: Launch) -> PreparedKernel:
    """Ends the call, behind everything on the stream that sends, or reads the workspace: counts it, and lets peers
    write again."""
    kernel = launch.prepared.get("end")
    if kernel is None:
        slot = launch.slot
        fixed = (slot.calls, slot.flags.pointers, launch.rank, launch.faults.stop, launch.world_size)
        kernel = launch.prepared["end"] = PreparedKernel(end_call, 1, (), fixed, num_warps=1)
    return kernel


SPOILT_AT_END = 3
"""Results that the kernel that ends a call spoils itself."""
BLOCK = 1024


def _words(result: torch.Tensor) -> int:
    return -(-result.nbytes // 4)


def spoil_kernel(launch: Launch, result: torch.Tensor) -> PreparedKernel:
    """Spoils results like ``result`` where the group has been aborted, behind everything on the stream that has made
    them."""
    key = "spoil", _words(result)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = PreparedKernel(spoil, 1, (result,), (_words(result), launch.faults.stop, BLOCK), num_warps=4)
        launch.remember(key, kernel)
    return kernel


def spoiling_end(launch: Launch, results: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """As ``end_kernel``, of a call with results like ``results``, which are spoilt where the group has been aborted."""
    key = ("spoiling end", *map(_words, results))
    end = launch.prepared.get(key)
    if end is None:
        end = _spoiling_end(launch, results)
        launch.remember(key, end)
    return end  # type: ignore[no-any-return]


def _spoiling_end(launch: Launch, results: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    slot, at_end, others = (
        launch.slot,
        list(results[:SPOILT_AT_END]),
        [spoil_kernel(launch, result) for result in results[SPOILT_AT_END:]],
    )
    missing = SPOILT_AT_END - len(at_end)
    words = [*map(_words, at_end), *[0] * missing]
    fixed = (slot.calls, slot.flags.pointers, launch.rank, launch.faults.stop, *words, launch.world_size, BLOCK)
    kernel = PreparedKernel(end_call_and_spoil, 1, (*at_end, *[None] * missing), fixed, num_warps=4)

    def end(results: Sequence[torch.Tensor]) -> None:
        for result, spoils in zip(results[SPOILT_AT_END:], others, strict=True):
            spoils(result)
        kernel(*results[:SPOILT_AT_END], *[None] * missing)

    return end

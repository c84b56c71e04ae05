"""Waiting for what peers send, as launches of their own: until rows have come, and until they have and are copied into
a result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_inductor.kernels.layout import WAIT_RESULT
from overlap_inductor.kernels.partial_sums import receive_rows
from overlap_inductor.kernels.transfer import wait_for_parts
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.transfer import Transfer

BLOCK, BLOCKS_AN_SM = 2048, 4
"""Elements that a block copies at once, and blocks an SM: fewer have too few loads in flight."""


def wait_kernel(launch: Launch, transfer: Transfer, first: int, last: int, kind: int) -> PreparedKernel:
    """Lets the stream go on when parts ``first .. last - 1`` of the peers' transfers have come; ``kind`` of wait, for
    the fault record."""
    slot = launch.slot
    fixed = (
        slot.flags.local, slot.calls, launch.faults.stop, launch.patience_ns, launch.site, launch.rank,
        transfer.index, first, slot.signals, launch.world_size, transfer.parts, -transfer.direction, kind,
    )  # fmt: skip
    return PreparedKernel(wait_for_parts, last - first, (), fixed, num_warps=1)


def receive_kernel(
    launch: Launch, everyone: torch.Tensor, finished: torch.Tensor, transfer: Transfer, sms: int
) -> Callable[[torch.Tensor], None]:
    """Copies every peer's finished rows, parts of ``transfer``, from the workspace to a result when they have come.
    Both lie in the order of ranks.

    Args:
        everyone: an example of the result, ``[world_size * rows, width]``; finished: the workspace from these rows on.
    """
    world_size = launch.world_size
    stripes, vector = max(1, BLOCKS_AN_SM * sms // (world_size - 1)), 16 // everyone.element_size()
    wait = wait_kernel(launch, transfer, 0, transfer.parts * (world_size - 1), WAIT_RESULT)
    fixed = (finished, launch.rank, everyone.numel() // world_size // vector, world_size, stripes, vector, BLOCK)
    copy = PreparedKernel(receive_rows, stripes * (world_size - 1), (everyone,), fixed, num_warps=8)

    def receive(everyone: torch.Tensor) -> None:
        wait()
        copy(everyone)

    return receive

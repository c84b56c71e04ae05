# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for what peers send."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_inductor.kernels.layout import WAIT_RESULT
from overlap_inductor.kernels.partial_sums import receive_rows
from overlap_inductor.kernels.transfer import wait_for_parts
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments
from overlap_inductor.transports.transfer import Transfer

BLOCK, BLOCKS_AN_SM = 2048, 4
"""Elements that a block copies at once, and blocks per SM. With fewer blocks, too few loads are in flight."""


def wait_kernel(launch: Launch, transfer: Transfer, first: int, last: int, kind: int) -> PreparedKernel:
    """A kernel that holds the stream until parts ``first .. last - 1`` have arrived, or until the group is aborted.
    Parts are numbered from peer to peer: part ``u`` is part ``u % parts`` of the shard that comes from the peer at
    distance ``u // parts + 1``. ``kind``: one of ``WAIT_...`` in ``kernels.layout``, for the fault record."""
    fixed = {
        **call_arguments(wait_for_parts, launch),
        "index": transfer.index,
        "first": first,
        "PARTS": transfer.parts,
        "DIRECTION": -transfer.direction,
        "KIND": kind,
    }
    return PreparedKernel(wait_for_parts, last - first, {}, fixed, num_warps=1)


def receive_kernel(
    launch: Launch, everyone: torch.Tensor, finished: torch.Tensor, transfer: Transfer, sms: int
) -> Callable[[torch.Tensor], None]:
    """A function that waits for the finished rows of all peers (the parts of ``transfer``), and copies them from the
    workspace to a result. In the workspace and in the result, rows are in the order of ranks.

    Args:
        everyone: an example of the result, ``[world_size * rows, width]``, fp16 or bf16.
        finished: the workspace from the first finished row on, as a flat tensor of the result's dtype.
        sms: SMs of the device.
    """
    world_size = launch.world_size
    stripes, vector = max(1, BLOCKS_AN_SM * sms // (world_size - 1)), 16 // everyone.element_size()
    wait = wait_kernel(launch, transfer, 0, transfer.parts * (world_size - 1), WAIT_RESULT)
    fixed = {
        **call_arguments(receive_rows, launch),
        "finished": finished,
        "vectors": everyone.numel() // world_size // vector,
        "STRIPES": stripes,
        "VECTOR": vector,
        "BLOCK": BLOCK,
    }
    copy = PreparedKernel(receive_rows, stripes * (world_size - 1), {"out": everyone}, fixed, num_warps=8)

    def receive(everyone: torch.Tensor) -> None:
        wait()
        copy(everyone)

    return receive

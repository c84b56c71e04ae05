"""Leave to write into peers' workspace, as launches of their own: waiting for it before a call's first transfer, and giving it at the call's end."""

from __future__ import annotations

import torch

from overlap_inductor.kernels.layout import ANNOUNCED
from overlap_inductor.kernels.signals import end_call
from overlap_inductor.kernels.transfer import wait_for_credits
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.workspace import Launch


def announced(launch: Launch) -> torch.Tensor:
    """Word ``[1]`` on the device: the number that signals of the call have, from ``credit_kernel`` on."""
    return launch.slot.queues[ANNOUNCED : ANNOUNCED + 1]


def credit_kernel(launch: Launch) -> PreparedKernel:
    """Lets the stream go on when every peer has ended the slot's call before this one."""
    kernel = launch.prepared.get("credits")
    if kernel is None:
        slot = launch.slot
        fixed = (slot.flags.local, slot.calls, announced(launch), launch.faults.stop, launch.patience_ns, launch.site, launch.rank, launch.world_size)
        kernel = launch.prepared["credits"] = PreparedKernel(wait_for_credits, 1, (), fixed, num_warps=1)
    return kernel


def end_kernel(launch: Launch) -> PreparedKernel:
    """Ends the call, behind everything on the stream that sends, or reads the workspace: counts it, and lets peers write again."""
    kernel = launch.prepared.get("end")
    if kernel is None:
        slot = launch.slot
        fixed = (slot.calls, slot.flags.pointers, launch.rank, launch.faults.stop, launch.world_size)
        kernel = launch.prepared["end"] = PreparedKernel(end_call, 1, (), fixed, num_warps=1)
    return kernel

# SPDX-License-Identifier: Apache-2.0
"""Starts and ends a rank under torchrun: one GPU for each rank, or several ranks on a GPU."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def allow_sharing() -> None:
    """Allow symmetric memory between ranks that share a GPU. Let gloo use the loopback interface, unless
    ``GLOO_SOCKET_IFNAME`` is set."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def start_rank(seconds: float = 600.0, share_gpus: bool = False) -> tuple[int, int]:
    """Choose the rank's GPU and make the default group. Returns ``(rank, world size)``. ``seconds`` is the timeout of
    the group and of the waits in its kernels.

    With ``share_gpus``, several ranks share a GPU, so a test of many ranks needs few GPUs. NCCL allows only one rank
    on a GPU, so the group uses gloo. Processes take turns on a GPU, so kernels that wait for each other are slow.
    """
    timeout = datetime.timedelta(seconds=seconds)
    local = int(os.environ["LOCAL_RANK"])
    if share_gpus:
        allow_sharing()
        torch.cuda.set_device(local % torch.cuda.device_count())
        dist.init_process_group("gloo", timeout=timeout)
    else:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=device(), timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def finish_rank() -> None:
    dist.barrier()
    dist.destroy_process_group()

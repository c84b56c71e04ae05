"""One GPU a rank, as torchrun starts them; or several ranks a GPU."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def allow_sharing() -> None:
    """Symmetric memory is told to allow several ranks on a GPU, and gloo to stay on this machine."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def start_rank(seconds: float = 600.0, share_gpus: bool = False) -> tuple[int, int]:
    """``(rank, world size)``, with the rank's GPU chosen and an NCCL group made, whose timeout (the patience of its
    kernels, too) is ``seconds``.

    ``share_gpus``: ranks go round the GPUs, so that few GPUs stand for many. NCCL has no two ranks on one GPU, so the
    group is gloo's, and symmetric memory is told to allow it. Processes take turns on a GPU, milliseconds at a time:
    kernels that wait for each other go on, slowly.
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
    """The rank's GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def finish_rank() -> None:
    dist.barrier()
    dist.destroy_process_group()

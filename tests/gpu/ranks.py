"""One GPU a rank, as torchrun starts them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start_rank() -> tuple[int, int]:
    """``(rank, world size)``, with the rank's GPU chosen and an NCCL group made."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return dist.get_rank(), dist.get_world_size()


def finish_rank() -> None:
    dist.barrier()
    dist.destroy_process_group()

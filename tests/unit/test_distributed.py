# SPDX-License-Identifier: Apache-2.0
"""Which tensors a process group can send."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.distributed import why_no_send


def test_gloo_does_not_send_from_gpus() -> None:
    """A send of a GPU tensor over gloo ends the process. So ``why_no_send`` must refuse GPU tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert why_no_send(name, torch.device("cpu")) is None
        assert "gloo sends from the host's memory only" in (why_no_send(name, torch.device("cuda")) or "")
        assert "no backend for tensors on meta" in (why_no_send(name, torch.device("meta")) or "")
    finally:
        dist.destroy_process_group()

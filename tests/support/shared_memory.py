# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory without GPUs, for sites in Triton's interpreter: files that all processes of a machine map."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.runtime import arena
from overlap_inductor.torch_compat import symmetric

SMALL_TILES = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 2, "warps": 4, "stages": 1}
SMALL = {**SMALL_TILES, "pieces": 2, "pushers": 1, "parts": 2}


def use_shared_memory(folder: str) -> None:
    """For the rest of the process, all groups get symmetric memory in files of ``folder``, and fused kernels get small
    tiles."""
    count = itertools.count()

    def allocate(
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        together: symmetric.Together = symmetric.each_alone,
    ) -> symmetric.SymmetricBuffer:
        number = next(count)
        names = [str(Path(folder) / f"{group.group_name}.{number}.{peer}") for peer in range(group.size())]
        what = f"allocate {elements * dtype.itemsize} bytes of symmetric memory"
        local = together(
            what, lambda: torch.from_file(names[group.rank()], shared=True, size=elements, dtype=dtype).zero_()
        )
        dist.barrier(group)
        peers = tuple(
            local if p == group.rank() else torch.from_file(names[p], shared=True, size=elements, dtype=dtype)
            for p in range(group.size())
        )
        dist.barrier(group)
        return symmetric.SymmetricBuffer(local, peers, torch.tensor([p.data_ptr() for p in peers]), None)

    def reachable(ranks: Any, device: torch.device) -> None:
        return None

    symmetric.allocate = allocate
    symmetric.why_no_symmetric_memory = reachable
    # The bytes of the smallest tile: 16 rows of 8 elements of two bytes. On GPUs, the smallest tile has 128 rows.
    arena.TILE_BYTES = 256
    fused_plan.TUNED = dict.fromkeys(fused_plan.TUNED, SMALL)

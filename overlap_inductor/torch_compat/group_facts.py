# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process as plain data for the cache key."""

from __future__ import annotations

import torch.distributed as dist


def group_facts() -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """``(name, global ranks, backend)`` of every process group that this rank is in, sorted by name. Empty if
    ``torch.distributed`` is not initialized."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    from torch.distributed import distributed_c10d

    names = distributed_c10d._world.pg_names
    return tuple(sorted((str(names[g]), tuple(dist.get_process_group_ranks(g)), dist.get_backend(g)) for g in names))

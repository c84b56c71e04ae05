"""The process groups of this process as plain facts, for the cache key."""

from __future__ import annotations

import torch.distributed as dist


def group_facts() -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """(name, global ranks, backend) of every process group that this rank is in, in order of name."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_names.items()
    return tuple(
        sorted((str(name), tuple(dist.get_process_group_ranks(group)), dist.get_backend(group)) for group, name in groups)
    )

# SPDX-License-Identifier: Apache-2.0
"""Runs a program of many ranks in one process, with PyTorch's ``fake`` backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as distributed_c10d

from overlap_inductor.errors import ConfigError

_MODULES = (dist, distributed_c10d, device_mesh)
"""The modules in which programs and PyTorch look up the functions that make groups."""


class RanksError(ConfigError):
    """The program asks for a number of ranks that it cannot get."""


@contextmanager
def one_process_as(ranks: int, fixed: bool, most: int | None = None) -> Iterator[None]:
    """In this context, every new process group has the ``fake`` backend. This process has the ``rank`` that the
    program passes, if the default group has this rank; else rank 0. The environment variables of ``torchrun`` hold the
    group's size and rank 0. At the end, the variables are restored and the default group is destroyed.

    Args:
        ranks: size of the default group, unless the program passes a ``world_size``.
        fixed: whether a ``world_size`` other than ``ranks`` raises ``RanksError``.
        most: a larger ``world_size`` raises ``RanksError``. ``None``: no limit.
    """

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *rest: Any,
        **keywords: Any,
    ) -> None:
        size = world_size if world_size > 0 else ranks
        if fixed and size != ranks:
            raise RanksError(
                f"the script asks for world_size={size}, and --ranks is {ranks}; leave --ranks out, or let the script"
                " read WORLD_SIZE"
            )
        if most is not None and size > most:
            raise RanksError(f"the script asks for world_size={size}, and the machine has {most} GPUs")
        os.environ.update(_variables(size))
        make_group("fake", timeout=timeout, world_size=size, rank=rank if 0 <= rank < size else 0)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **keywords: Any) -> Any:
        # With ``None``, the new group gets the backend of the default group, which is ``fake``. Another backend would
        # try to connect to the other ranks.
        return make_subgroup(ranks, timeout, None, *rest, **keywords)

    make_group, make_subgroup = dist.init_process_group, dist.new_group
    before = {name: os.environ.get(name) for name in _variables(ranks)}
    os.environ.update(_variables(ranks))
    _replace(init_process_group, new_group)
    try:
        yield
    finally:
        _replace(make_group, make_subgroup)
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _replace(init_process_group: Any, new_group: Any) -> None:
    for module in _MODULES:
        setattr(module, "init_process_group", init_process_group)
        setattr(module, "new_group", new_group)


def _variables(ranks: int) -> dict[str, str]:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    return {
        **rank,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }

# SPDX-License-Identifier: Apache-2.0
"""Process groups by name."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

from overlap_inductor.errors import OverlapError


def resolve_group(group_name: str) -> dist.ProcessGroup:
    """The live process group of this name. Raises ``OverlapError`` if this process has no such group now."""
    try:
        return _resolve_process_group(group_name)
    except (RuntimeError, ValueError) as error:
        raise OverlapError(
            f"process group {group_name!r} does not exist on this rank: {error}. The compiled graph was made for"
            " another set of groups; create the same groups again, or recompile (torch._dynamo.reset())."
        ) from error


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or ``None`` if ``torch.distributed`` is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def group_ranks(group_name: str) -> tuple[int, ...] | None:
    """Global ranks of a group in group order, or ``None`` if there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        group = resolve_group(group_name)
    except OverlapError:
        return None
    return tuple(dist.get_process_group_ranks(group))


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The group's key-value store, which prefixes keys with the group's name. Raises ``KeyError`` if the group was
    destroyed."""
    return distributed_c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """The backend's timeout for a collective; torch's default if the backend has none."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return distributed_c10d.default_pg_timeout


def counter(group: dist.ProcessGroup) -> tuple[Callable[[], int], bool]:
    """``(count, exact)``.

    ``count`` returns how many collectives the group's backend has issued on this rank. The backend is that of the
    accelerator or, if it does not count, that of the CPU. If neither counts, ``count`` returns 0.

    ``exact``: whether only collectives are counted, as in NCCL (``seqCollective_`` of torch's ``ProcessGroupNCCL``).
    Gloo also counts sends and receives.
    """
    for device in (torch.accelerator.current_accelerator(), torch.device("cpu")):
        try:
            backend = group._get_backend(device)
            backend._get_sequence_number_for_group()
        except (RuntimeError, TypeError, AttributeError):
            continue
        return backend._get_sequence_number_for_group, backend.name().lower() == "nccl"
    return _uncounted, True


def _uncounted() -> int:
    return 0


def group_description(group_name: str) -> str | None:
    """The group's description, or ``None``. For a group of a ``DeviceMesh``, the name of the mesh dim (``tp``). Raises
    ``OverlapError`` if there is no such group."""
    group = resolve_group(group_name)
    description = getattr(group, "group_desc", None)
    if not description or description in ("default_pg", "undefined"):
        return None
    return description.removeprefix("mesh_")


def is_alive(group: dist.ProcessGroup) -> bool:
    return group in distributed_c10d._world.pg_map


def moves_nothing(group: dist.ProcessGroup) -> bool:
    """Whether the group exchanges nothing: it has one rank, or its backend is ``fake``."""
    return group.size() < 2 or is_fake(group)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend is ``fake``: a dry run without other ranks."""
    return dist.get_backend(group) == "fake"


def why_no_send(group_name: str, device: torch.device) -> str | None:
    """Why the group's backend cannot send tensors on ``device``, or ``None``. Raises ``OverlapError`` if there is no
    such group."""
    group = resolve_group(group_name)
    try:
        backend = group._get_backend(device).name()
    except RuntimeError as error:
        return f"group {group_name!r} has no backend for tensors on {device.type}: {error}"
    if device.type != "cpu" and backend.lower() == "gloo":
        return f"gloo sends from the host's memory only, but the tensors of group {group_name!r} are on {device.type}"
    return None


def why_no_backend(device: torch.device) -> str | None:
    """Why this torch has no backend for tensors on ``device``, or ``None``."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    backend = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):
        return f"this torch was built without {backend}, which groups of ranks on {device.type} need"
    return None

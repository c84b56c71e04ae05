# SPDX-License-Identifier: Apache-2.0
"""Facts about torch and Inductor for ``overlap-inductor doctor``. "Slot" means Inductor's setting for post-grad passes
(``pass_slot.SLOT``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.config import OverlapConfig


def symmetric_memory_backend(device_index: int = 0) -> str:
    """The backend that symmetric memory uses on a GPU: ``CUDA``, ``NVSHMEM`` or ``NCCL``.

    Raises:
        RuntimeError: this torch has no symmetric memory for the GPU.
    """
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError as error:
        raise RuntimeError(f"this torch has no symmetric memory: {error}") from error
    found = symmetric_memory.get_backend(torch.device("cuda", device_index))
    if not found:
        raise RuntimeError("this torch registers no symmetric memory backend for CUDA")
    return str(found)


def has_multicast(device_index: int = 0) -> bool:
    """Whether the driver offers multicast objects (NVLink SHARP) on a GPU."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device_index))


def nccl_version() -> str:
    """NCCL's version, such as ``2.28.9``; empty if this torch has no NCCL."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    version: Any = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def slot_content() -> str:
    """The passes that the slot holds now, in words."""
    from overlap_inductor.inductor import pass_slot

    return pass_slot.describe(pass_slot.read())


def config_in_slot() -> OverlapConfig | None:
    """The configuration of our pass in the slot. ``None`` if our pass is not there, or if overlap is not switched on.

    Raises:
        ConfigError: a switch has a value that is not allowed.
    """
    from overlap_inductor.inductor import pass_slot

    ours = pass_slot.find(pass_slot.read())
    return ours.config() if ours is not None else None


def hindrances() -> list[tuple[str, str]]:
    """``(setting, consequence and advice)`` for each setting of Inductor or Dynamo that keeps the pass from overlapping
    sites."""
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config

    found = []
    if dynamo_config.disable:
        advice = (
            "torch.compile does nothing, so no graph reaches the pass. "
            "Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE."
        )
        found.append(("torch._dynamo.config.disable", advice))
    if inductor_config.cpp_wrapper:
        advice = "overlap ops are called from Python only; every site is refused. Unset TORCHINDUCTOR_CPP_WRAPPER."
        found.append(("torch._inductor.config.cpp_wrapper", advice))
    if inductor_config._micro_pipeline_tp:
        advice = (
            "PyTorch's own pass takes the all-gather and reduce-scatter sites first. "
            "Switch it off to leave them to overlap_inductor."
        )
        found.append(("torch._inductor.config._micro_pipeline_tp", advice))
    return found

# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of the machine: software, distributed backends, GPUs and the links between them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from overlap_inductor.cli.doctor_checks import BAD
from overlap_inductor.cli.doctor_checks import GOOD
from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check
from overlap_inductor.torch_compat.versions import supported
from overlap_inductor.torch_compat.versions import unsupported_reason

_TOOL_SECONDS = 10
_PIDFD_GETFD = 438
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_FABRIC_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


def software() -> list[Check]:
    """Versions of the software. A check is ``bad`` if torch is missing or not supported, or a needed compiler is
    missing."""
    section = "Software"
    checks = [Check(section, "python", GOOD, platform.python_version())]
    try:
        import torch
    except ImportError as error:
        return [*checks, Check(section, "torch", BAD, f"cannot be imported: {error}", f"Install torch {supported()}.")]
    reason = unsupported_reason()
    checks.append(Check(section, "torch", BAD if reason else GOOD, str(torch.__version__), reason or ""))
    triton = _version("triton")
    gpu = torch.cuda.is_available()
    if triton:
        checks.append(Check(section, "triton", GOOD, triton))
    else:
        advice = "Inductor needs it to compile for GPUs: install the triton that belongs to this torch." if gpu else ""
        checks.append(Check(section, "triton", BAD if gpu else NOTE, "not installed", advice))
    for name, use in (("transformers", 'models with tp_plan="auto"'), ("accelerate", "from_pretrained with a tp_plan")):
        version = _version(name)
        value = version or f"not installed; only needed for {use}"
        checks.append(Check(section, name, GOOD if version else NOTE, value))
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), "")
    if compiler:
        checks.append(Check(section, "C++ compiler", GOOD, compiler))
    else:
        advice = "Inductor compiles CPU code with it: install g++, or set CXX."
        checks.append(Check(section, "C++ compiler", NOTE if gpu else BAD, "not found", advice))
    return checks


def distributed() -> list[Check]:
    """Whether torch has backends that can carry the transfers. A check is ``bad`` if there is none."""
    import torch
    import torch.distributed as dist

    section = "Distributed"
    if not dist.is_available():
        return [Check(section, "torch.distributed", BAD, "not built into this torch", "Install a torch that has it.")]
    from overlap_inductor.inductor import probe

    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    gpus = torch.cuda.device_count()
    absent = "not built into this torch"
    checks = [
        Check(section, "gloo (CPU)", GOOD if gloo else NOTE, "available" if gloo else absent),
        Check(section, "nccl (GPU)", GOOD if nccl else NOTE, f"available, {probe.nccl_version()}" if nccl else absent),
    ]
    if not gloo and not (nccl and gpus):
        checks.append(
            Check(
                section, "transport p2p", BAD, "no backend for it", "Install a torch with gloo, or with NCCL and GPUs."
            )
        )
    elif gpus and not nccl:
        advice = "The GPUs cannot exchange tensors without NCCL: install a CUDA build of torch."
        checks.append(Check(section, "transport p2p", NOTE, "CPU only", advice))
    else:
        checks.append(Check(section, "transport p2p", GOOD, "on GPUs and CPU" if nccl and gpus else "on CPU"))
    return checks


def gpus() -> list[Check]:
    """GPUs, peer access, NVLink, and the requirements of symmetric memory. Overlap works without them, so no check is
    ``bad``."""
    import torch

    section = "GPUs"
    number = torch.cuda.device_count()
    if not number:
        return [Check(section, "GPUs", NOTE, "none visible; overlap works between CPU ranks (gloo)")]
    names = "\n".join(f"{i}: {_gpu(i)}" for i in range(number))
    checks = [Check(section, "GPUs", GOOD, names)]
    if number > 1:
        pairs = [(i, j) for i in range(number) for j in range(number) if i != j]
        without = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        if without:
            advice = (
                "Transfers between these GPUs go through host memory and are slow. Overlap then has more time to hide,"
                " but may also gain nothing."
            )
            checks.append(Check(section, "peer access", NOTE, f"missing: {', '.join(without)}", advice))
        else:
            checks.append(Check(section, "peer access", GOOD, f"between all {number} GPUs"))
    links = tool_output(["nvidia-smi", "nvlink", "--status"])
    active = sum("GB/s" in line for line in links.splitlines())
    value = f"{active} links active on {number} GPUs" if active else "no active link seen"
    checks.append(Check(section, "NVLink", GOOD if active else NOTE, value))
    return [*checks, *symmetric_memory()]


def _gpu(number: int) -> str:
    """A GPU's name and compute capability, such as ``NVIDIA H200, compute capability 9.0``."""
    import torch

    capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
    return f"{torch.cuda.get_device_name(number)}, compute capability {capability}"


def symmetric_memory() -> list[Check]:
    """Whether processes can map each other's GPU memory, and whether the driver offers multicast."""
    from overlap_inductor.inductor import probe
    from overlap_inductor.lowerings.registry import SCHEDULES

    section = "GPUs"
    users = [s.name for s in SCHEDULES if s.holds_workspace]
    others = [s.name for s in SCHEDULES if not s.holds_workspace]
    try:
        value = f"backend {probe.symmetric_memory_backend()}; used by {', '.join(users) or 'no schedule'}"
        checks = [Check(section, "symmetric memory", GOOD, value)]
        multicast = "offered by the driver" if probe.has_multicast() else "not offered by the driver"
    except RuntimeError as error:
        value = (
            f"not available: {error}; needed by {', '.join(users) or 'no schedule'};"
            f" not needed by {', '.join(others) or 'any other'}"
        )
        return [Check(section, "symmetric memory", NOTE, value)]
    checks.append(handle_exchange(section))
    switch = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    value = f"{multicast}; TORCH_SYMM_MEM_DISABLE_MULTICAST is {'not set' if switch is None else switch}"
    return [*checks, Check(section, "multicast", NOTE, value)]


def handle_exchange(section: str) -> Check:
    """Whether processes can exchange handles of GPU memory: as fabric handles, or as file descriptors by
    ``pidfd_getfd``."""
    fabric = _FABRIC_CHANNELS.is_dir() and any(_FABRIC_CHANNELS.iterdir())
    refusal = pidfd_refusal()
    scope = _PTRACE_SCOPE.read_text().strip() if _PTRACE_SCOPE.exists() else "absent"
    value = f"fabric handles: {'yes' if fabric else 'no'}; pidfd_getfd: {refusal or 'allowed'}; ptrace_scope: {scope}"
    if fabric or (not refusal and scope in ("absent", "0", "1")):
        return Check(section, "handle exchange", GOOD, value)
    advice = (
        "Symmetric memory would fail to rendezvous: allow pidfd_getfd in the container (SYS_PTRACE) "
        "and set kernel.yama.ptrace_scope to 0 or 1."
    )
    return Check(section, "handle exchange", NOTE, value, advice)


def pidfd_refusal() -> str:
    """Try to duplicate a file descriptor of this process through a pidfd. Returns why this is not allowed, or an empty
    text."""
    if not hasattr(os, "pidfd_open"):
        return "not offered by this system"
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    source, target = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, source, 0)
    failure = ctypes.get_errno() if copy < 0 else 0
    for descriptor in (pidfd, source, target, *((copy,) if copy >= 0 else ())):
        os.close(descriptor)
    return (
        os.strerror(failure) + (" (blocked by a seccomp profile?)" if failure == errno.EPERM else "") if failure else ""
    )


def tool_output(command: list[str]) -> str:
    """A tool's standard output. Empty if the tool is absent, fails or takes more than ``_TOOL_SECONDS``."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""

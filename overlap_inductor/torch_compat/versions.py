# SPDX-License-Identifier: Apache-2.0
"""Reads torch's version, and says whether this package knows the private interfaces of that version."""

from __future__ import annotations

OLDEST = (2, 11)
FIRST_UNKNOWN = (2, 16)


def torch_version() -> str:
    """``torch.__version__``. Safe inside ``import torch``, which sets the attribute early."""
    import torch

    return str(torch.__version__)


def release(version: str) -> tuple[int, int] | None:
    """``(major, minor)`` of a version, also of a pre-release: ``2.13.0a0+git1`` gives ``(2, 13)``. ``None`` if it is
    not a version by PEP 440."""
    # Imported here, so that an import of this module stays cheap.
    from packaging.version import InvalidVersion
    from packaging.version import Version

    try:
        found = Version(version)
    except InvalidVersion:
        return None
    return found.major, found.minor


def supported() -> str:
    """The versions of torch that are supported: ``2.11 to 2.15``."""
    return f"{OLDEST[0]}.{OLDEST[1]} to {FIRST_UNKNOWN[0]}.{FIRST_UNKNOWN[1] - 1}"


def unsupported_reason(version: str | None = None) -> str | None:
    """Why this version of torch is not supported, and what to install. ``None`` if it is supported."""
    version = torch_version() if version is None else version
    found = release(version)
    if found is not None and OLDEST <= found < FIRST_UNKNOWN:
        return None
    return (
        f"overlap_inductor supports torch {supported()} and this is torch {version}; nothing is overlapped. "
        "Install a supported torch, or a newer overlap_inductor."
    )

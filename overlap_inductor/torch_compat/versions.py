# SPDX-License-Identifier: Apache-2.0
"""The version of torch, and whether this package knows its private interfaces."""

from __future__ import annotations

import re

OLDEST = (2, 11)
FIRST_UNKNOWN = (2, 16)


def torch_version() -> str:
    """``torch.__version__``. Safe inside ``import torch``, which sets the attribute early."""
    import torch

    return str(torch.__version__)


def unsupported_reason(version: str | None = None) -> str | None:
    """Why this version of torch is not supported, as a sentence, or ``None`` if it is."""
    version = torch_version() if version is None else version
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and OLDEST <= (int(match[1]), int(match[2])) < FIRST_UNKNOWN:
        return None
    oldest, newest = ".".join(map(str, OLDEST)), f"{FIRST_UNKNOWN[0]}.{FIRST_UNKNOWN[1] - 1}"
    return (
        f"overlap_inductor supports torch {oldest} to {newest} and this is torch {version}; nothing is overlapped. "
        "Install a supported torch, or a newer overlap_inductor."
    )

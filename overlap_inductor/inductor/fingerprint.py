"""The identity of the pass: whatever may change the code that a graph compiles to is in here, nothing else.

It is part of Inductor's and AOTAutograd's cache keys. The dump folder is not in it; reports are stored with the
compiled graph, so that a hit writes what the miss wrote.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.group_facts import group_facts
from overlap_inductor.torch_compat.versions import torch_version

OFF = "overlap_inductor: off"


def hash_sources(folder: Path) -> str:
    """SHA-256 over the paths and contents of every Python file below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def source_hash() -> str:
    """``hash_sources`` of this package, computed once: the code that runs is the code that was imported."""
    return hash_sources(Path(overlap_inductor.__file__).parent)


def fingerprint(config: OverlapConfig | None) -> str:
    """The pass's ``uuid`` under ``config``; one constant where the pass does nothing.

    The process groups are in it because an ``all_reduce`` names its group and not the group's size: the same graph text
    means another plan where the group has other ranks. So is what the GPUs reach, on which fused kernels rest, and what
    decides whether calls are replayed.
    """
    if config is None or config.mode == "off":
        return OFF
    facts = (
        overlap_inductor.__version__,
        torch_version(),
        source_hash(),
        config.cache_key(),
        group_facts(),
        symmetric.reach(),
        symmetric.one_queue(),
    )
    return "overlap_inductor: " + hashlib.sha256(repr(facts).encode()).hexdigest()

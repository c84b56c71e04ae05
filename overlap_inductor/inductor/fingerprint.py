# SPDX-License-Identifier: Apache-2.0
"""The identity of the pass: a hash of everything that can change its result, except the graph.

The hash is part of the cache keys of Inductor and AOTAutograd. It leaves out the switches ``dump`` and ``notice``,
which do not change the result. Stored reports name no dump folder, so a cache hit can write them to the folder that is
set then.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from functools import lru_cache
from pathlib import Path

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.lowerings.schedule import SiteSchedule
from overlap_inductor.passes.pattern import Pattern
from overlap_inductor.passes.patterns import PATTERNS
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.group_facts import group_facts
from overlap_inductor.torch_compat.target import target
from overlap_inductor.torch_compat.versions import torch_version
from overlap_inductor.transports.registry import transports
from overlap_inductor.transports.transport import Transport

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
    """``hash_sources`` of this package. Cached, because the code that runs is the code that was imported."""
    return hash_sources(Path(overlap_inductor.__file__).parent)


def registered() -> list[tuple[str, str]]:
    """``(name, digest of the sources)`` of every registered schedule, pattern and transport.

    For an entry of this package, the digest is empty, because ``source_hash`` covers it. For another entry, the digest
    covers the modules that define the entry's class and ops:

    - module of a package: every Python file below the module's folder;
    - other module: the module's file;
    - module without a file (a notebook): a digest that is new in each process. So no cache returns old code.
    """
    entries: list[SiteSchedule | Pattern | Transport] = [*SCHEDULES, *PATTERNS, *transports()]
    found = []
    for entry in entries:
        modules = {type(entry).__module__, *getattr(entry, "ops", ())}
        outside = sorted(m for m in modules if not m.startswith(f"{overlap_inductor.__name__}."))
        found.append((entry.name, " ".join(_module_hash(module) for module in outside)))
    return found


@lru_cache
def _module_hash(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return _THIS_PROCESS
    # A folder without ``__init__.py`` may also hold files of other programs. So only the module's file is hashed.
    folder = Path(file).parent
    return hash_sources(folder) if (folder / "__init__.py").exists() else _file_hash(Path(file))


def _file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_THIS_PROCESS = uuid.uuid4().hex


def fingerprint(config: OverlapConfig | None) -> str:
    """The pass's ``uuid`` under ``config``; ``OFF`` if the pass does nothing.

    Some facts that the hash covers, and why:

    - the process groups: an ``all_reduce`` names its group but not the group's size;
    - which peers' memory the GPUs reach: fused kernels depend on it;
    - the machine that plans are made for, if it is not this machine;
    - whether all streams share one hardware queue: a site's launches are then not replayed as a CUDA graph;
    - schedules, patterns and transports from outside the package.
    """
    if config is None or config.mode == "off":
        return OFF
    facts = (
        overlap_inductor.__version__,
        torch_version(),
        source_hash(),
        config.cache_key(),
        registered(),
        group_facts(),
        symmetric.reach(),
        target(),
        symmetric.one_queue(),
    )
    return "overlap_inductor: " + hashlib.sha256(repr(facts).encode()).hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""Reports compiles and calls of ops where PyTorch's tools look: Dynamo's counters, ``TORCH_TRACE``, ``TORCH_LOGS`` and
profiler ranges."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

LOG_NAME = "overlap_inductor"


def count(counts: Mapping[str, int]) -> None:
    """Add ``counts`` to ``torch._dynamo.utils.counters["overlap_inductor"]``."""
    from torch._dynamo.utils import counters

    counters[LOG_NAME].update(counts)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact to the ``TORCH_TRACE`` log. ``encoding``: ``string`` or ``json``; tlparse knows no other."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def register_log_name() -> None:
    """Let ``TORCH_LOGS="+overlap_inductor"`` find our logger without importing all our subpackages.

    Works from torch 2.13 on, which runs autoload entry points before it reads ``TORCH_LOGS``.
    """
    from torch._logging import _internal

    if not _internal.log_registry.is_log(LOG_NAME):
        _internal.register_log(LOG_NAME, LOG_NAME)


def has_handlers_of_others(logger: logging.Logger) -> bool:
    """Whether a record of ``logger`` reaches a handler that PyTorch did not install. PyTorch installs a handler on
    every registered logger."""
    from torch._logging import _internal

    found: logging.Logger | None = logger
    while found is not None:
        if not all(map(_internal._is_torch_handler, found.handlers)):
            return True
        found = found.parent if found.propagate else None
    return False


def global_rank() -> int:
    """This process's rank in the default process group, else the launcher's ``RANK``, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def in_range(name: str, site_at: int, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``implementation`` of op ``name`` in a profiler range. The range's name contains the site's id, by which
    the report also names the site. ``site_at``: index of the site's id among the op's arguments."""

    import torch

    profiler = torch.autograd.profiler

    def ranged(*arguments: Any, **keywords: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return implementation(*arguments, **keywords)
        with torch.profiler.record_function(f"overlap_inductor::{name} {arguments[site_at]}"):
            return implementation(*arguments, **keywords)

    return ranged

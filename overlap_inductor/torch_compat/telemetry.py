"""Where PyTorch looks for news of a compile: Dynamo's counters, ``TORCH_TRACE`` artifacts, ``TORCH_LOGS`` names."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

LOG_NAME = "overlap_inductor"


def count(counts: Mapping[str, int]) -> None:
    """Add to ``torch._dynamo.utils.counters["overlap_inductor"]``."""
    from torch._dynamo.utils import counters

    counters[LOG_NAME].update(counts)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact to the ``TORCH_TRACE`` log; ``encoding`` is ``string`` or ``json`` (tlparse knows no other)."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def register_log_name() -> None:
    """Let ``TORCH_LOGS="+overlap_inductor"`` find our logger by name.

    Without it PyTorch finds the logger as well, but by importing all our sub-packages. It is of use where the
    autoload entry points run before ``TORCH_LOGS`` is read, which is so from torch 2.13.
    """
    from torch._logging import _internal

    if not _internal.log_registry.is_log(LOG_NAME):
        _internal.register_log(LOG_NAME, LOG_NAME)


def global_rank() -> int:
    """This process's rank: of the default process group, else what the launcher said, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def in_range(name: str, site_at: int, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation`` of op ``name`` inside a range that carries the site's id, its argument number ``site_at``,
    wherever a profiler looks on: so that a trace's ops and kernels can be joined with the report. It costs nothing
    else."""

    import torch

    profiler = torch.autograd.profiler

    def ranged(*arguments: Any, **keywords: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return implementation(*arguments, **keywords)
        with torch.profiler.record_function(f"overlap_inductor::{name} {arguments[site_at]}"):
            return implementation(*arguments, **keywords)

    return ranged

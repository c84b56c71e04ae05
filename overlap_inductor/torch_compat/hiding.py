# SPDX-License-Identifier: Apache-2.0
"""Tells which setting of Inductor hides data-parallel collectives without our help.

A *gather* of a weight is hidden if it starts before earlier work. A *reduction* of a gradient is hidden if later work
runs before its wait::

    mm(x, w); gather; wait; mm(y, v)       ->  gather; mm(x, w); wait; mm(y, v)
    mm(g, x); reduce; wait; mm(h, y)       ->  mm(g, x); reduce; mm(h, y); wait

Settings that only merge collectives into buckets (``bucket_reduce_scatters_fx``, ...) do neither: the merged collective
starts behind the last of its inputs, and its wait follows at once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_inductor.torch_compat.ordering import SCHEDULING

_EARLIER = {"raise_comms", "reorder_compute_for_overlap", "reorder_communication_preserving_peak_memory"}
"""Inductor's reordering passes that start collectives earlier."""
_LATER = {"sink_waits", "sink_waits_iterative", "reorder_compute_for_overlap"}
"""Inductor's reordering passes that move waits later."""


def gather_hider() -> str | None:
    """The name of a setting that is on and starts gathers of weights ahead, or ``None``. Without such a setting, a
    gather stands where its weight is used."""
    return _reordering(_EARLIER) or _scheduling()


def reduction_hider(kind: str) -> str | None:
    """The name of a setting that is on and moves the wait of a reduction of this kind behind later work, or ``None``.
    Without such a setting, the wait directly follows the reduction."""
    return _reordering(_LATER) or _scheduling() or (_ddp() if kind == "all_reduce" else None)


def _reordering(names: Collection[str]) -> str | None:
    """The setting that turns on Inductor's reordering passes, if the list of these passes holds one of ``names``, or a
    function of the user, which may move anything. By default, the list is empty, and the setting moves nothing."""
    from torch._inductor import config

    if not config.reorder_for_compute_comm_overlap or getattr(config, "deterministic", False):
        return None
    listed: list[Any] = config.reorder_for_compute_comm_overlap_passes
    called = [one if isinstance(one, str) else getattr(one, "__name__", "") for one in listed]
    moves = any(name in names or name not in _EARLIER | _LATER for name in called)
    return "reorder_for_compute_comm_overlap" if moves else None


def _scheduling() -> str | None:
    from torch._inductor import config

    distributed: Any = getattr(config, "aten_distributed_optimizations", None)
    return SCHEDULING if getattr(distributed, "enable_overlap_scheduling", False) else None


def _ddp() -> str | None:
    """The setting with which a compiled ``DistributedDataParallel`` (``optimize_ddp="python_reducer"``) merges its
    all-reduces and delays their waits. It runs before our pass."""
    from torch._inductor import config

    delays = "schedule_comm_wait" in config._fuse_ddp_communication_passes
    return "_fuse_ddp_communication" if config._fuse_ddp_communication and delays else None

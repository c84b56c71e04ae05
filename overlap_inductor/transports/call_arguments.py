# SPDX-License-Identifier: Apache-2.0
"""``call_arguments``: the arguments that have the same name and value in every kernel of a call."""

from __future__ import annotations

from typing import Any

from overlap_inductor.runtime.workspace import Launch


def call_arguments(kernel: Any, launch: Launch) -> dict[str, Any]:
    """``{parameter's name: value}`` for the parameters of ``kernel`` that describe the call's slot, group and site. A
    slot is memory and flags, used by one call at a time.

    ``peer_data`` and ``peer_flags`` are int64 ``[world_size]`` addresses. ``flags``, ``queues`` and ``calls`` are this
    rank's int32 tensors. ``signals`` is the number of flags per sending rank. ``stop`` is the group's fault memory,
    int32. ``patience`` is in nanoseconds. ``site`` is the site's number in the fault record.
    """
    slot, faults = launch.slot, launch.faults
    known = {
        "peer_data": slot.data.pointers,
        "peer_flags": slot.flags.pointers,
        "flags": slot.flags.local,
        "queues": slot.queues,
        "calls": slot.calls,
        "signals": slot.signals,
        "stop": faults.stop,
        "patience": launch.patience_ns,
        "site": launch.site,
        "rank": launch.rank,
        "WORLD": launch.world_size,
    }
    return {name: known[name] for name in kernel.arg_names if name in known}

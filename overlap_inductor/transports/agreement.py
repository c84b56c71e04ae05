"""Agreement: the ranks of a group compare their plan of a graph before an overlap op of that graph moves data.

A pass never communicates (a cache hit on one rank would leave the others waiting), so the comparison happens at the graph's first
run: every rank publishes its plan under a key in the group's store and reads the others', with a deadline. Ranks first run the
graphs of a group in the same order, so the n-th plan published by one rank is compared with the n-th of the others.

A plan is a JSON object; its top-level keys (version, torch, configuration, how many sites of each kind, digest) are what the error names.
"""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass
from dataclasses import field

import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout


@dataclass
class _GroupState:
    group: dist.ProcessGroup
    incarnation: int
    published: int = 0
    agreed: set[str] = field(default_factory=set)
    newest: str | None = None


_STATE: dict[str, _GroupState] = {}


def _state(group: dist.ProcessGroup) -> _GroupState:
    """State of a live group. A destroyed group whose name is used again gets a new one, and new keys in the store."""
    known = _STATE.get(group.group_name)
    if known is None or known.group is not group:
        known = _GroupState(group, 0 if known is None else known.incarnation + 1)
        _STATE[group.group_name] = known
    return known


def agree(group: dist.ProcessGroup, plan: str) -> None:
    """Compare ``plan`` with the other ranks' on its first call; later calls with the same plan are one set lookup.

    Raises:
        AgreementError: another rank has a different plan, or published none before the deadline; on every rank alike.
    """
    state = _state(group)
    if plan in state.agreed:
        return
    number = state.published
    state.published += 1
    store = group_store(group)
    prefix = f"overlap_inductor/agree/{state.incarnation}/{number}"
    rank, size = group.rank(), group.size()
    store.set(f"{prefix}/{rank}", plan)
    seconds = json.loads(plan).get("config", {}).get("agreement_timeout", 300)
    limit = min(datetime.timedelta(seconds=seconds), group_timeout(group))
    deadline = time.monotonic() + limit.total_seconds()
    others = {peer: _read(store, f"{prefix}/{peer}", deadline) for peer in range(size) if peer != rank}
    differing = [_difference(peer, plan, other, group) for peer, other in others.items() if other != plan]
    if differing:
        raise AgreementError(
            f"rank {dist.get_rank()} and other ranks of group {group.group_name!r} do not run the same overlap plan, so no data "
            f"was moved: {'; '.join(differing)}. Start every rank with the same OVERLAP_INDUCTOR* variables, package and torch "
            f"versions, and the same model (waited at most {limit.total_seconds():.0f} s)."
        )
    state.agreed.add(plan)
    state.newest = plan


def plans_waiting(group: dist.ProcessGroup) -> str:
    """Peers that wait with a plan which this rank has not compiled, for the error of a transfer that found no partner; or ``""``.

    A rank that alone compiles again (a guard that failed only there) stops at its comparison, while the others go on with the plan that
    all had agreed upon.
    """
    state = _state(group)
    if state.newest is None:
        return ""
    store = group_store(group)
    prefix = f"overlap_inductor/agree/{state.incarnation}/{state.published}"
    found = []
    for peer in range(group.size()):
        try:
            waiting = peer != group.rank() and store.check([f"{prefix}/{peer}"])
            if waiting:
                found.append(_difference(peer, state.newest, store.get(f"{prefix}/{peer}").decode(), group))
        except RuntimeError:
            # The store may have died with its rank.
            return ""
    return f"Meanwhile another plan was compiled by {'; '.join(found)}. " if found else ""


def _read(store: dist.Store, key: str, deadline: float) -> str | None:
    remaining = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait([key], datetime.timedelta(seconds=remaining))
    except (RuntimeError, ValueError):
        return None
    return store.get(key).decode()


def _difference(peer: int, mine: str, other: str | None, group: dist.ProcessGroup) -> str:
    rank = dist.get_global_rank(group, peer)
    if other is None:
        return f"rank {rank} published no plan (is overlap_inductor switched off there, or did it die?)"
    a, b = json.loads(mine), json.loads(other)
    keys = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    parts = []
    for key in keys:
        x, y = a.get(key), b.get(key)
        if key == "sites" and isinstance(x, dict) and isinstance(y, dict):
            parts += [f"{x.get(k, 0)} sites here and {y.get(k, 0)} there are {k}" for k in sorted(x.keys() | y.keys()) if x.get(k) != y.get(k)]
        elif isinstance(x, dict) and isinstance(y, dict):
            parts += [f"{k} is {x.get(k)!r} here and {y.get(k)!r} there" for k in sorted(x.keys() | y.keys()) if x.get(k) != y.get(k)]
        else:
            parts.append(f"{key} is {x!r} here and {y!r} there")
    return f"rank {rank}: {', '.join(parts)}"

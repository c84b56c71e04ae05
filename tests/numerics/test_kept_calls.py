# SPDX-License-Identifier: Apache-2.0
"""The calls of a graph without overlap. The other ranks may wait for the plan of such a call, so each call publishes
its plan. But the call must not wait for the group's store."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.runtime import agreement
from overlap_inductor.runtime import call_store
from overlap_inductor.runtime.call_page import CALLS
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_state import state_of
from overlap_inductor.torch_compat.distributed import group_store
from tests.support.gloo_ranks import run_ranks

KEPT = "g0: all_reduce float32 kept"
RING = "g0: all_reduce float32 [4] in matmul_all_reduce by ring"


def _comparison(step: str) -> agreement.Comparison:
    """The comparison of a graph on a CPU. Its plan has one step."""
    group = dist.group.WORLD
    assert group is not None
    plan = ExchangePlan("1", "on", (step,), step != KEPT, groups=((group.group_name,),))
    return agreement.Comparison(plan, [group], every_call=True)


def _run(comparison: agreement.Comparison) -> bool:
    """One call of the graph. Returns whether it was overlapped."""
    return (comparison.count() or comparison.call().overlapped) and comparison.plan.overlaps


class _Counted:
    """A store that counts what is called."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, collections.Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


def _kept(rank: int, world_size: int) -> tuple[dict[str, int], int]:
    comparison, group = _comparison(KEPT), dist.group.WORLD
    assert group is not None
    store = group_store(group)
    for _ in range(CALLS):
        _run(comparison)
    dist.barrier()
    keys, counted = store.num_keys(), _Counted(store)
    dist.barrier()
    call_store.group_store = lambda group: counted
    # The backend has counted the barriers, so this call looks for calls that this rank ran uncompiled.
    _run(comparison)
    counted.calls.clear()
    for _ in range(2 * CALLS):
        _run(comparison)
    dist.barrier()
    return dict(counted.calls), store.num_keys() - keys


def test_a_call_without_overlap_writes_one_key_and_waits_for_no_answer() -> None:
    """``set`` sends and goes on. ``add``, ``get``, ``check`` and ``delete_key`` wait for an answer."""
    for calls, more in run_ranks(2, _kept):
        assert calls == {"set": 2 * CALLS}
        # ``dist.barrier`` may leave keys of its own.
        assert more < CALLS


def _one_rank_keeps(rank: int, world_size: int) -> list[bool]:
    """Both ranks overlap a graph, and then one rank runs another one without overlap, again and again."""
    state = state_of(dist.group.WORLD)
    state._page_tried = True  # as if the ranks shared no memory
    same, kept = _comparison(RING), _comparison(KEPT)
    turns = [same, same, *[kept if rank else same] * 3, same, same]
    return [_run(turn) for turn in turns]


def test_other_ranks_read_the_calls_of_a_rank_without_overlap() -> None:
    """They run the plain program in these calls, and nobody waits."""
    first, second = run_ranks(2, _one_rank_keeps, timeout=60)
    assert first == second, (first, second)
    assert first[:5] == [True, True, False, False, False]


def _far_ahead(rank: int, world_size: int) -> list[str | None]:
    state = state_of(dist.group.WORLD)
    if rank:
        state.publish("early:0:0:0")
        dist.barrier()
        dist.barrier()
        state.calls += CALLS
        state.publish("late:0:0:0")
        dist.barrier()
        return []
    dist.barrier()
    found = [state.published(1), state.published(1, next_call=True)]
    dist.barrier()
    dist.barrier()
    with pytest.raises(Overwritten):
        state.published(1)
    state.calls += CALLS
    return [*found, state.published(1)]


def test_a_value_is_read_only_for_its_own_call() -> None:
    """A value stays in the store until a later call takes its key."""
    assert run_ranks(2, _far_ahead)[0] == ["early:0:0:0", None, "late:0:0:0"]


class _Dead:
    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any, **named: Any) -> Any:
            raise dist.DistNetworkError("broken pipe")

        return fail


def _without_store(rank: int, world_size: int) -> list[str]:
    comparison = _comparison(KEPT)
    for _ in range(2):
        _run(comparison)
    dist.barrier()
    call_store.group_store = lambda group: _Dead()
    found = []
    for call in (comparison.count, comparison.call):
        try:
            call()
        except AgreementError as error:
            found.append(str(error))
    return found


def test_a_lost_store_is_an_error_of_the_package() -> None:
    for found in run_ranks(2, _without_store, timeout=60):
        assert found and all("A rank probably died" in text for text in found)

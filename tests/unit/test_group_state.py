# SPDX-License-Identifier: Apache-2.0
"""A process group has one state for each kind of state and each device. After the group is destroyed, its
states are dropped when any new state is made outside a capture. A later group of the same name gets new states."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import TransferError
from overlap_inductor.runtime import group_state
from overlap_inductor.runtime.call_state import state_of
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports import exchange
from tests.support.fake_group import fake_group

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(eq=False)
class Thing:
    owner: Owner


def test_a_group_has_one_state_for_each_kind_and_device() -> None:
    kind = Kind("thing", Thing)
    with fake_group() as group:
        assert kind.known(group, CPU) is None
        one, other, whole = kind.of(group, CPU), kind.of(group, META), kind.of(group)
        assert (one.owner.device, other.owner.device, whole.owner.device) == (CPU, META, None)
        assert kind.of(group, CPU) is one and kind.of(group) is whole and kind.known(group, META) is other
        assert Kind("another thing", Thing).of(group, CPU) is not one
        held = group_state.held_by(group)
        assert (held["thing", CPU], held["thing", META], held["thing", None]) == (one, other, whole)


def test_states_of_a_destroyed_group_are_closed_in_reverse_order_and_dropped() -> None:
    ended: list[str] = []
    workspace = Kind("workspace", Thing, lambda thing: ended.append("workspace"))
    counters = Kind(
        "counters", lambda owner: (workspace.of(owner.group), Thing(owner)), lambda _: ended.append("calls")
    )
    with fake_group() as first:
        counters.of(first)
        assert [name for name, _ in group_state.held_by(first)] == ["workspace", "counters"], (
            "a state on which another one depends comes first"
        )
    assert not ended and workspace.known(first) is not None, "the end of a group is not noticed at once"
    with fake_group() as second:
        assert second.group_name == first.group_name
        state_of(second)
        assert ended == ["calls", "workspace"] and not group_state.held_by(first), "a new state of any kind closes them"
        assert workspace.known(first) is None and workspace.known(second) is None
        with pytest.raises(OverlapError, match="process group '0' was destroyed, and its workspace with it"):
            workspace.of(first)
        assert workspace.known(first) is None
        assert workspace.of(second).owner == Owner(second, None, 1)
    assert ended == ["calls", "workspace"], "each state is closed once"


def test_each_kind_counts_its_own_groups_of_a_name() -> None:
    """``incarnation`` is the number of earlier groups with this name and a state of this kind. It is part of keys in
    the store, so it must be equal on all ranks. A group may have states of some kinds only, so each kind has its own
    count."""
    always, sometimes = Kind("always", Thing), Kind("sometimes", Thing)
    for number in range(3):
        with fake_group() as group:
            assert always.of(group).owner.incarnation == number
            if number != 1:
                assert sometimes.of(group).owner.incarnation == number // 2


def test_nothing_is_dropped_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a state may wait for the GPU, which would invalidate the capture."""
    ended: list[Thing] = []
    kind = Kind("thing", Thing, ended.append)
    with fake_group() as first:
        old = kind.of(first)
    with fake_group() as second:
        monkeypatch.setattr(symmetric, "capturing", lambda: True)
        new = kind.of(second)
        assert new is not old and not ended
        monkeypatch.setattr(symmetric, "capturing", lambda: False)
        kind.of(second, CPU)
        assert ended == [old] and kind.of(second) is new


def test_a_state_stays_if_its_calls_cannot_be_waited_for() -> None:
    """If CUDA has failed, the end of running calls cannot be awaited. The calls may still use the state's memory."""
    broken = [True]

    def close(thing: Thing) -> None:
        if broken[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rests, kind = Kind("what it rests on", Thing), Kind("thing", Thing, close)
    with fake_group() as first:
        rests.of(first)
        kind.of(first)
    with fake_group() as second:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                kind.of(second)
            assert rests.known(first) is not None and kind.known(first) is not None
        broken[0] = False
        assert kind.of(second).owner.incarnation == 1
        assert rests.known(first) is None and kind.known(first) is None


def test_a_state_that_could_not_be_made_is_made_at_the_next_use() -> None:
    failing = [True]

    def make(owner: Owner) -> Thing:
        if failing[0]:
            raise OverlapError("a rank has no memory left")
        return Thing(owner)

    kind = Kind("thing", make)
    with fake_group() as group:
        with pytest.raises(OverlapError, match="no memory left"):
            kind.of(group)
        failing[0] = False
        assert kind.of(group).owner.incarnation == 0


def test_threads_make_a_state_once_and_the_states_of_two_devices_at_the_same_time() -> None:
    """All ranks make a workspace together, so a thread may wait for other ranks. Meanwhile, another thread must be able
    to make another workspace."""
    inside, made = threading.Barrier(2, timeout=30), list[Owner]()

    def make(owner: Owner) -> Thing:
        made.append(owner)
        inside.wait()
        return Thing(owner)

    kind, found = Kind("thing", make), list[Thing]()
    with fake_group() as group:
        threads = [
            threading.Thread(target=lambda device=device: found.append(kind.of(group, device)))
            for device in (CPU, CPU, META, META)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(made) == 2 and len(found) == 4 and len(set(found)) == 2


def test_exchanges_of_a_destroyed_group_are_not_those_of_the_next_one() -> None:
    """Ops find an exchange by its buffer's address, which a later group's buffer may reuse. The later group's ops must
    not find the destroyed group's exchange."""
    buffer = torch.zeros(2, 4)

    def opened(group: dist.ProcessGroup) -> exchange.Exchange:
        found = exchange.open_exchange(buffer, [0, 4], "ring", group, "site")
        assert found is not None and exchange.find_exchange(buffer, group, "site") is found
        return found

    with fake_group() as first:
        assert [opened(first).sequence, opened(first).sequence] == [1, 2]
    with fake_group() as second:
        with pytest.raises(TransferError, match="site site: no transfer is in flight for this buffer"):
            exchange.find_exchange(buffer, second, "site")
        assert opened(second).sequence == 1, "a new group counts from 1"
        exchange.close_exchange(buffer, second, "site")
        with pytest.raises(TransferError, match="no transfer is in flight"):
            exchange.find_exchange(buffer, second, "site")
        with pytest.raises(OverlapError, match="process group '0' was destroyed, and its exchanges with it"):
            exchange.find_exchange(buffer, first, "site")

# SPDX-License-Identifier: Apache-2.0
"""A call's place is the number of the group's collectives that the rank issued before the call. Places tell whether two
ranks make the same call."""

from __future__ import annotations

import itertools

import pytest

from overlap_inductor.runtime import call_board
from overlap_inductor.runtime.call_page import MOST_CHARACTERS
from overlap_inductor.runtime.call_place import MOVED
from overlap_inductor.runtime.call_place import REFUSED
from overlap_inductor.runtime.call_place import SKIPPED
from overlap_inductor.runtime.call_place import CallPlace
from overlap_inductor.runtime.call_place import Order
from overlap_inductor.runtime.call_place import order
from overlap_inductor.runtime.call_state import GroupState
from overlap_inductor.runtime.call_state import state_of
from tests.support.fake_group import fake_group


def _call(place: int, count: int = 1, passed: int = 0, plan: str = "plan", mark: str = "") -> CallPlace:
    return CallPlace(f"{plan}:0:{count}", passed, place, mark)


@pytest.mark.parametrize("mark", ["", SKIPPED, REFUSED, MOVED])
def test_a_value_is_read_as_it_was_written(mark: str) -> None:
    value = _call(12, 3, 7, "0123456789abcdef", mark)
    assert CallPlace.parsed(value.text) == value and value.end == 15


@pytest.mark.parametrize(
    ("mine", "theirs", "exact", "wanted"),
    [
        (_call(4), _call(4), True, Order.SAME),
        # Earlier, the other rank ran a collective in a compiled graph. This rank ran the same collective uncompiled.
        (_call(4, passed=2), _call(4, passed=3), True, Order.SAME),
        (_call(4), _call(4, plan="other", count=2), True, Order.SAME),
        (_call(4), _call(2, count=2, plan="other"), True, Order.EARLIER),
        (_call(4), _call(2, count=3, plan="other"), True, Order.UNKNOWN),
        (_call(4, count=2), _call(6), True, Order.LATER),
        (_call(4, count=3), _call(6), True, Order.UNKNOWN),
        # Gloo also counts sends and receives, so two ranks may count different places for one call. NCCL counts
        # collectives only.
        (_call(4), _call(5), False, Order.SAME),
        (_call(4), _call(5), True, Order.LATER),
        (_call(4, passed=2), _call(5, passed=3), False, Order.LATER),
        (_call(4, count=3), _call(6, count=3), True, Order.SAME),
        (_call(4), _call(4, mark=SKIPPED), True, Order.LATER),
    ],
)
def test_the_order_of_two_calls(mine: CallPlace, theirs: CallPlace, exact: bool, wanted: Order) -> None:
    assert order(mine, theirs, exact) is wanted


@pytest.mark.parametrize("exact", [True, False])
def test_two_ranks_reach_one_result(exact: bool) -> None:
    """If one rank finds ``EARLIER``, the other must find ``LATER``. If both found ``EARLIER``, both would skip a call
    and then wait for each other."""
    opposite = {Order.EARLIER: Order.LATER, Order.LATER: Order.EARLIER}
    calls = [_call(*fields) for fields in itertools.product((3, 4, 6), (1, 2), (1, 2), ("a", "b"))]
    for one, other in itertools.product(calls, calls):
        found = order(one, other, exact)
        assert order(other, one, exact) is opposite.get(found, found), (one, other)


def test_what_the_backend_counts_between_calls_moves_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [5]
    with fake_group(2) as group:
        state = GroupState(group, 0)
        state._count = lambda: counted[0]
        state.count(2)
        assert (state.calls, state.passed, state.place, state.between) == (1, 0, 5, True)
        counted[0] += 40  # A ring issues many sends.
        state.returned()
        state.count(1)
        assert (state.calls, state.passed, state.place, state.between) == (2, 2, 7, False)
        # The second call raises, so ``returned`` is not called. It is not known how many collectives the call issued.
        counted[0] += 3
        state.count(1)
        assert (state.passed, state.place) == (3, 8)
        state.returned()
        counted[0] += 4
        state.count(1)
        assert (state.passed, state.place, state.between) == (4, 13, True)
        state.level([_call(12, passed=6), _call(13, passed=5)])
        assert (state.passed, state.place) == (6, 13)


def test_a_value_fits_on_a_page() -> None:
    """A page is memory in which the ranks of one machine publish a value for each call. A value is longest if the plan
    has many parts and the ranks have run for years."""
    from overlap_inductor.facts.exchange import ExchangePlan

    with fake_group(2) as group:
        state = state_of(group)
        name = group.group_name
        parts = [ExchangePlan("1", "on", ("g0: all_reduce float32 kept",) * 99, groups=((name,),)) for _ in range(40)]
        state.passed, state.outside, state.mark = 10**13, 8 * 10**13, MOVED
        assert len(call_board.value(state, ExchangePlan.joined(parts)).text) <= MOST_CHARACTERS

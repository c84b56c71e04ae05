# SPDX-License-Identifier: Apache-2.0
"""Simulates the ring's routes on all ranks. A route says which pieces each rank sends and receives in each hop. A rank
must receive exactly what was sent to it.

- Gathers: a rank sends only pieces that it has, and has all pieces at the end.
- Reductions: each partial sum reaches its owner once.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from overlap_inductor.transports import routes

WORLDS = range(2, 10)
PARTS = range(1, 5)
GATHERS = ("ring", "bidirectional")


def every_size(test: Callable[..., None]) -> Any:
    """Run ``test`` for each number of ranks in ``WORLDS``. One test serves all numbers of parts, which is faster than a
    pytest case for each."""

    @functools.wraps(test)
    def with_all_parts(**arguments: Any) -> None:
        for parts in PARTS:
            test(parts=parts, **arguments)

    signature = inspect.signature(test)
    left = [parameter for name, parameter in signature.parameters.items() if name != "parts"]
    with_all_parts.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("world_size", WORLDS)(with_all_parts)


def hops(route: str, world_size: int, parts: int) -> list[list[routes.Hop]]:
    """All hops of a route, as ``[hop index][rank]``."""
    count = routes.hop_count(route, world_size, parts)
    return [[routes.hop(route, world_size, rank, parts, i) for rank in range(world_size)] for i in range(count)]


@every_size
@pytest.mark.parametrize("route", routes.ROUTES)
def test_every_hop_is_a_permutation(route: str, world_size: int, parts: int) -> None:
    """In a hop, ``sends[i]`` of all ranks are the sends on link ``i``. On each link, exactly one rank must send to each
    rank, and no rank to itself. Each receive needs a send, because a receive without a send hangs its rank."""
    for ranks in hops(route, world_size, parts):
        for link in range(len(ranks[0].sends)):
            assert sorted(h.sends[link].peer for h in ranks) == list(range(world_size))
        sent = Counter((r, m.peer, m.slot, m.part) for r, h in enumerate(ranks) for m in h.sends)
        received = Counter((m.peer, r, m.slot, m.part) for r, h in enumerate(ranks) for m in h.receives)
        assert sent == received
        assert all(source != target for source, target, _, _ in sent)


@every_size
@pytest.mark.parametrize("route", routes.ROUTES)
def test_slots_fit_the_buffer(route: str, world_size: int, parts: int) -> None:
    """No piece lies beyond the end of the exchange buffer, and no two pieces share a place."""
    received: Counter[tuple[int, int, int]] = Counter()
    for ranks in hops(route, world_size, parts):
        for rank, h in enumerate(ranks):
            assert all(
                0 <= m.slot < routes.slots(route, world_size) and 0 <= m.part < parts for m in h.sends + h.receives
            )
            received.update((rank, m.slot, m.part) for m in h.receives)
    assert set(received.values()) == {1}
    assert len(received) == world_size * (world_size - 1) * parts


@every_size
@pytest.mark.parametrize("route", GATHERS)
def test_gathers_bring_every_shard_to_every_rank(route: str, world_size: int, parts: int) -> None:
    """A rank must have a shard before it sends the shard. Every shard must arrive when ``distances`` says."""
    have = [{(rank, part) for part in range(parts)} for rank in range(world_size)]
    for index, ranks in enumerate(hops(route, world_size, parts)):
        before = [set(h) for h in have]
        for rank, h in enumerate(ranks):
            for move in h.sends:
                assert (move.slot, move.part) in before[rank]
                have[move.peer].add((move.slot, move.part))
        step, part = divmod(index, parts)
        for rank in range(world_size):
            for shift in routes.distances(route, world_size)[step]:
                assert ((rank + shift) % world_size, part) in have[rank]
    assert all(h == {(r, p) for r in range(world_size) for p in range(parts)} for h in have)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("route", (*GATHERS, "direct"))
def test_distances_name_every_other_rank_once(route: str, world_size: int) -> None:
    found = [shift % world_size for shifts in routes.distances(route, world_size) for shift in shifts]
    assert sorted(found) == list(range(1, world_size))
    assert len(routes.distances(route, world_size)) == routes.hop_count(route, world_size, 1)


@every_size
def test_owner_sends_every_partial_sum_to_its_owner(world_size: int, parts: int) -> None:
    """At step i, rank r sends its partial sum straight to rank r + 1 + i, part by part. For each part, each rank gets
    one partial sum from every other rank."""
    inbox: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for index, ranks in enumerate(hops("owner", world_size, parts)):
        step, part = divmod(index, parts)
        for rank, h in enumerate(ranks):
            (send,) = h.sends
            assert send.peer == (rank + 1 + step) % world_size and send.part == part
            inbox[send.peer].append((rank, send.slot, send.part))
    for rank, pieces in enumerate(inbox):
        assert {(source, part) for source, _, part in pieces} == {
            (s, p) for s in range(world_size) if s != rank for p in range(parts)
        }
        assert len(pieces) == (world_size - 1) * parts


@every_size
def test_travel_adds_every_partial_sum_once(world_size: int, parts: int) -> None:
    """At step i, rank r sends the accumulator of slice r - 1 - i to the next rank. When an accumulator reaches its
    slice's owner, it holds the partial sum of every other rank once."""
    arrived: list[dict[tuple[int, int], tuple[int, Counter[int]]]] = [{} for _ in range(world_size)]
    for index, ranks in enumerate(hops("travel", world_size, parts)):
        step, part = divmod(index, parts)
        leaving = []
        for rank, h in enumerate(ranks):
            owner, total = (rank - 1 - step) % world_size, Counter([rank])
            if step:
                named, partial = arrived[rank][step - 1, part]
                assert named == owner
                total += partial
            leaving.append((h.sends[0], owner, total))
        for move, owner, total in leaving:
            arrived[move.peer][move.slot, move.part] = (owner, total)
    for rank in range(world_size):
        for part in range(parts):
            owner, total = arrived[rank][world_size - 2, part]
            assert owner == rank and total + Counter([rank]) == Counter(range(world_size))


@every_size
def test_broadcast_sends_every_shard_to_every_rank(world_size: int, parts: int) -> None:
    """A piece's slot must be the rank of its owner."""
    have = [{(rank, part) for part in range(parts)} for rank in range(world_size)]
    for ranks in hops("broadcast", world_size, parts):
        for rank, h in enumerate(ranks):
            for move in h.sends:
                assert move.slot == rank
                have[move.peer].add((move.slot, move.part))
    assert all(len(h) == world_size * parts for h in have)


def test_hop_counts_are_those_of_the_table() -> None:
    """The counts equal those in the docstring of ``routes``. Two directions halve the number of steps, rounded up."""
    assert [routes.hop_count(r, 8, 3) for r in routes.ROUTES] == [21, 12, 21, 21, 3, 21]
    assert [routes.hop_count(r, 5, 1) for r in routes.ROUTES] == [4, 2, 4, 4, 1, 4]


@pytest.mark.parametrize("parts", range(1, 9))
def test_bounds_cut_all_rows_evenly(parts: int) -> None:
    """No row is lost or doubled at a cut, and sizes differ by at most one row."""
    for total in range(20):
        cuts = routes.bounds(total, parts)
        sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        assert (cuts[0], cuts[-1], len(sizes)) == (0, total, parts)
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 0


def test_unknown_routes_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown route 'circle'; expected one of ring"):
        routes.hop("circle", 4, 0, 1, 0)
    with pytest.raises(ValueError, match="on route 'owner', shards do not come step by step"):
        routes.distances("owner", 4)

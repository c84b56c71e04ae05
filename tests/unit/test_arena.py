# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping of ``WorkspaceArena``, with ordinary memory instead of symmetric memory.

An arena divides a group's workspace into *slots*. A site gets a slot, and each call of the site uses this slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.runtime.arena import ALIGNMENT
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import WorkspaceArena
from overlap_inductor.runtime.arena import planned_bytes
from overlap_inductor.runtime.arena import slots_for


@dataclass(frozen=True)
class Plain:
    local: torch.Tensor

    @property
    def peers(self) -> tuple[torch.Tensor, ...]:
        return (self.local,)

    @property
    def pointers(self) -> torch.Tensor:
        return torch.tensor([self.local.data_ptr()])


def arena(limit: int = 2**30, capturing: bool = False) -> WorkspaceArena:
    return WorkspaceArena(
        4, torch.device("cpu"), lambda n, dtype: Plain(torch.zeros(n, dtype=dtype)), lambda: capturing, limit
    )


requests = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 8)), min_size=1, max_size=12).map(
    lambda pairs: [Request(f"site{i}", nbytes, signals) for i, (nbytes, signals) in enumerate(pairs)]
)


@given(requests, st.integers(2, 4))
def test_every_site_has_room_and_its_neighbour_another_slot(sites: list[Request], count: int) -> None:
    made = arena()
    made.prepare(sites, count)
    slots = [made.slot(r.site) for r in sites]
    assert all(slot.nbytes >= r.nbytes and slot.signals >= r.signals for slot, r in zip(slots, sites, strict=True))
    assert all(a is not b for a, b in zip(slots, slots[1:]))
    assert made.nbytes == planned_bytes(sites, count, 4) and len(made.slots) == min(count, len(sites))


@given(requests, requests)
def test_a_later_graph_moves_no_slot(first: list[Request], second: list[Request]) -> None:
    """Captured graphs hold addresses, so a site keeps its slot while the slot is large enough."""
    made = arena()
    made.prepare(first)
    before = {r.site: made.slot(r.site).data.local.data_ptr() for r in first}
    later = [Request(f"later {r.site}", r.nbytes, r.signals) for r in second]
    made.prepare([*first, *later])
    assert {r.site: made.slot(r.site).data.local.data_ptr() for r in first} == before
    assert all(made.slot(r.site).nbytes >= r.nbytes for r in later)
    assert all(made.slot(a.site) is not made.slot(b.site) for a, b in zip(later, later[1:]))


def test_slots_that_are_large_enough_are_used_again() -> None:
    made = arena()
    made.prepare([Request("a", 5000, 2), Request("b", 3000, 1)])
    size = made.nbytes
    made.prepare([Request("c", 4000, 2), Request("d", 100, 1)])
    assert made.nbytes == size and len(made.slots) == 2


def test_sizes_of_slots() -> None:
    sites = [Request("a", 10, 1), Request("b", 5000, 4), Request("c", 2000, 2)]
    assert slots_for(sites, 2) == [(2 * ALIGNMENT, 2), (5 * ALIGNMENT, 4)]


def test_nothing_is_allocated_in_a_capture() -> None:
    with pytest.raises(OverlapError, match="captured"):
        arena(capturing=True).prepare([Request("a", 10, 1)])


def test_the_limit_is_kept() -> None:
    made = arena(limit=100_000)
    made.prepare([Request("a", 50_000, 1)])
    with pytest.raises(OverlapError, match="the limit is 100000"):
        made.prepare([Request("b", 60_000, 1)])
    assert len(made.slots) == 1


def test_sites_of_all_protocols_get_slots_or_none_of_them_does() -> None:
    left = [4]

    def allocate(elements: int, dtype: torch.dtype) -> Plain:
        left[0] -= 1
        if left[0] < 0:
            raise OverlapError("rank 1 has no memory left")
        return Plain(torch.zeros(elements, dtype=dtype))

    made = WorkspaceArena(4, torch.device("cpu"), allocate, lambda: False, 2**30)
    made.prepare([Request("a", 100, 1)])
    before = made.slot("a")
    with pytest.raises(OverlapError, match="rank 1 has no memory left"):
        made.prepare([Request("a", 5000, 1), Request("b", 100, 1, HALVES)])
    assert made.slots == [before] and made.slot("a") is before and not made.knows("b", HALVES)


def test_a_site_without_a_prepared_slot_is_an_error() -> None:
    with pytest.raises(OverlapError, match="not prepared"):
        arena().slot("a")


def test_protocols_share_no_slot() -> None:
    """A call of protocol ``HALVES`` gives no credits. If a call of protocol ``CREDITS`` came next in the same slot,
    it would wait for a credit that nobody gives."""
    made = arena()
    sites = [
        Request("a", 5000, 2),
        Request("b", 300, 1, HALVES),
        Request("c", 100, 1),
        Request("b", 100, 1),
        Request("d", 100, 1, HALVES),
    ]
    made.prepare(sites)
    assert {id(made.slot(s)) for s in "abc"}.isdisjoint({id(made.slot(s, HALVES)) for s in "bd"})
    assert made.slot("b", HALVES).protocol == HALVES and all(made.holds(s) for s in sites)
    assert len(made.slots) == 4 and made.nbytes == planned_bytes(sites, 2, 4) and made.missing_bytes(sites) == 0
    later = [Request("e", 200, 1, HALVES), Request("f", 200, 1)]
    assert made.missing_bytes(later) == 0
    made.prepare(later)
    assert len(made.slots) == 4 and made.slot("e", HALVES).protocol == HALVES


@given(requests, requests)
def test_a_site_that_is_prepared_twice_has_room_for_both_requests(first: list[Request], second: list[Request]) -> None:
    """A site may be compiled again for another token count. The site's slot must then suffice for the old graph and the
    new graph, even if the new graph needs more bytes and fewer signals."""
    made = arena()
    made.prepare(first)
    made.prepare(second)
    assert all(made.holds(r) for r in (*first, *second))


@pytest.mark.parametrize("pattern", fused_plan.TUNED)
@pytest.mark.parametrize("most", [1, 5120, 6144, 9216])
def test_a_workspace_for_the_most_tokens_holds_any_fewer_tokens(pattern: str, most: int) -> None:
    parameters = fused_plan.FusedParameters(132, **fused_plan.TUNED[pattern])
    planned = fused_plan.needed(pattern, 8, -(-most // 8), 64, 64, 2, parameters)
    for tokens in range(1, most + 1, 61):
        rows = -(-tokens // 8)
        nbytes, signals = fused_plan.needed(pattern, 8, rows, 64, 64, 2, parameters)
        bands = -(-rows // fused_plan.band_rows(rows, 8, parameters))
        assert nbytes <= planned[0] and bands * (2 if pattern == "matmul_all_reduce" else 1) <= signals <= planned[1], (
            tokens
        )

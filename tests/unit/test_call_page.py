# SPDX-License-Identifier: Apache-2.0
"""A page is memory in which each rank has entries for each call. A half-written entry counts as absent. A rank that
reads an overwritten entry gets an error.

- In the first entry, the rank publishes its plan.
- In the other entries, the rank says its *verdicts*: whether it found all plans equal. A comparison may need several
  *rounds*. In each round, a rank says one verdict and reads the other ranks' verdicts.
"""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from overlap_inductor.runtime import call_board
from overlap_inductor.runtime import call_page
from overlap_inductor.runtime import call_state
from overlap_inductor.runtime.call_page import CALLS
from overlap_inductor.runtime.call_page import MOST_CHARACTERS
from overlap_inductor.runtime.call_page import MOST_ROUNDS
from overlap_inductor.runtime.call_page import CallPage
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_page import page_bytes
from tests.support.fake_group import fake_group


def _pages(size: int) -> tuple[mmap.mmap, list[CallPage]]:
    memory = mmap.mmap(-1, page_bytes(size))
    return memory, [CallPage(memory, rank, size) for rank in range(size)]


def test_all_publish_the_same() -> None:
    _, pages = _pages(3)
    for page in pages:
        assert not pages[0].all_publish(1, "plan:0")
        page.publish(1, "plan:0")
    assert all(page.all_publish(1, "plan:0") for page in pages)
    assert not pages[0].all_publish(1, "plan:1") and not pages[0].all_publish(2, "plan:0")
    pages[1].publish(1, "plan:0!")
    assert not pages[0].all_publish(1, "plan:0") and pages[0].published(1, 1) == "plan:0!"


def test_soon_waits_for_a_rank_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a host is only a little late, the ranks must not exchange verdicts, because verdicts are slow."""
    assert call_board._SOON > 25 * call_board._SPIN
    monkeypatch.setattr(call_board, "_SOON", 30.0)  # On a busy machine, the timer may be late itself.
    _, pages = _pages(2)
    pages[0].publish(1, "plan:0")
    late = threading.Timer(25 * call_board._SPIN, lambda: pages[1].publish(1, "plan:0"))
    late.start()
    assert call_board.soon(pages[0], 1, "plan:0")
    late.join()


@pytest.mark.parametrize("call, text", [(1, "plan:1"), (1 + CALLS, "plan:0")], ids=["another value", "far ahead"])
def test_soon_does_not_wait_for_a_rank_that_differs(call: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_board, "_SOON", 30.0)
    begun = time.monotonic()
    _, pages = _pages(2)
    pages[0].publish(1, "plan:0")
    pages[1].publish(call, text)
    assert not call_board.soon(pages[0], 1, "plan:0")
    assert time.monotonic() - begun < 15.0


def test_soon_ends_without_the_other_rank() -> None:
    _, pages = _pages(2)
    pages[0].publish(1, "plan:0")
    assert not call_board.soon(pages[0], 1, "plan:0")


def test_calls_and_rounds_do_not_touch_each_other() -> None:
    _, pages = _pages(2)
    texts = {}
    for call in range(1, CALLS + 1):
        for page in pages:
            page.publish(call, f"{call}:{page._rank}")
            for number in range(MOST_ROUNDS):
                page.say(call, number, f"{number}")
                texts[call, number, page._rank] = f"{number}"
    assert all(pages[1 - r].said(call, number, r) == text for (call, number, r), text in texts.items())
    assert all(pages[0].published(call, 1) == f"{call}:1" for call in range(1, CALLS + 1))


class Said(dict[tuple[str, object], str]):
    """A store of one rank's verdicts, by call and round."""

    first_pause, growth = 0.0, 1.0

    def say(self, call: str, number: object, text: str) -> None:
        self[call, str(number)] = text

    def said(self, call: str, number: object, rank: int) -> str | None:
        return self.get((call, str(number)))


def test_rounds_without_a_place_on_the_page_go_through_the_store() -> None:
    """A graph with many groups has more rounds than the page has entries for a call. A verdict without an entry of its
    own must not overwrite another entry, or lie past the page's end."""
    with fake_group(2) as group:
        state = call_state.state_of(group)
        store = Said()
        memory, (state.page, theirs) = _pages(2)
        state.store, state.calls = store, CALLS - 1  # type: ignore[assignment]
        for number in range(MOST_ROUNDS + 2):
            call_board.say(state, number, call_board.EQUAL)
            if number < MOST_ROUNDS:
                theirs.say(state.calls, number, call_board.EQUAL)
        assert list(store) == [(str(CALLS - 1), str(number)) for number in (MOST_ROUNDS, MOST_ROUNDS + 1)]
        assert all(page.published(CALLS, 0) is None for page in (state.page, theirs))
        deadline = time.monotonic() + 5
        assert all(call_board.said(state, 1, n, deadline) == call_board.EQUAL for n in range(MOST_ROUNDS + 2))


@pytest.mark.parametrize("text", ["", "x", "x" * MOST_CHARACTERS])
def test_texts_of_any_length(text: str) -> None:
    _, (mine, theirs) = _pages(2)
    assert mine.published(7, 1) is None
    theirs.publish(7, text)
    assert mine.published(7, 1) == text


def test_a_text_that_has_no_room_is_an_error() -> None:
    _, (page,) = _pages(1)
    with pytest.raises(ValueError, match="more than"):
        page.publish(1, "x" * (MOST_CHARACTERS + 1))


def test_an_entry_that_is_half_written_counts_as_absent() -> None:
    """Only the first or the last bytes of the entry have arrived. The remaining bytes are those of an earlier call, or
    zeros."""
    memory, (mine, theirs) = _pages(2)
    call = 5 + CALLS
    start = theirs._offset(call, 0, 1)
    end = start + call_page.ENTRY
    for earlier in (False, True):
        memory[start:end] = bytes(call_page.ENTRY)
        if earlier:
            theirs.publish(call - CALLS, "earlier:0")
        old = memory[start:end]
        theirs.publish(call, "plan:0")
        new = memory[start:end]
        for cut in range(1, call_page.ENTRY):
            for torn in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
                memory[start:end] = torn
                assert mine.published(call, 1) == ("plan:0" if torn == new else None)


def test_an_entry_that_a_later_call_has_overwritten_is_an_error() -> None:
    _, (mine, theirs) = _pages(2)
    theirs.publish(3, "plan:0")
    theirs.publish(3 + CALLS, "plan:0")
    assert mine.published(3 + CALLS, 1) == "plan:0"
    with pytest.raises(Overwritten):
        mine.published(3, 1)
    assert mine.published(3 + 2 * CALLS, 1) is None

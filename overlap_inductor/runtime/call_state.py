# SPDX-License-Identifier: Apache-2.0
"""``GroupState``: what this rank knows of the calls and plans of a group (``agreement``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field

import torch.distributed as dist

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.runtime import call_report
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.call_page import CallPage
from overlap_inductor.runtime.call_page import shared_page
from overlap_inductor.runtime.call_place import CallPlace
from overlap_inductor.runtime.call_store import CallStore
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.torch_compat.blocked_threads import in_collective
from overlap_inductor.torch_compat.distributed import counter
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")


@dataclass(eq=False)
class GroupState:
    """This rank's knowledge of the calls and plans of a live group.

    Attributes:
        incarnation: see ``group_state.Owner``.
        calls: this rank's number for the newest call of a graph that holds a collective of the group. A number that
            ``call_board.skip`` skips counts too. ``share_page`` may set ``calls`` to ``place``.
        passed: number of the group's collectives in the graphs of all calls before the newest one.
        outside: number of the group's collectives that the backend counted between calls.
        between: whether the backend counted a collective between the newest call and the call before it.
        exact: whether the backend counts nothing but collectives (``call_place``).
        mark: ``SKIPPED``, ``REFUSED``, ``MOVED`` or ``""`` (``call_place``). It is a part of the *value*, the text that
            this rank publishes for the newest call.
        agreed: digests of plans that all ranks agreed to run.
        rejected: digests of plans that the ranks rejected, each with the reason.
        tied: digests of agreed plans that all ranks compare at every call, on the call pages of all the plan's groups.
        unasked: digests of agreed plans that all ranks run without comparing again.
        parts: digests of the plans of subgraphs, which are parts of agreed plans.
        overlapped: for each agreed plan, its collectives.
        told: digests of plans whose text this rank has published. The word ``"here"`` is also in the set, if this
            rank has published that it compiles with overlap on (``call_board.announce``).
        reported: the differences that were logged, as tuples of digests. ``("uncompiled",)`` is in the set if a
            difference with verdict ``ONCE`` (``call_board``) was logged. All such differences share this entry.
        newest: the plan that was agreed upon last.
        apart: why overlap is disabled for the group; ``""`` if it is not.
        page: the group's call page, shared memory to which each rank writes its value for a call. ``None`` before the
            first agreement, or if the ranks share no memory.
        skipped: ``{rank: value}`` for one other rank that published the call that this rank skipped last. Empty if
            this rank has skipped none.
        lock, promised, told_inside: see ``call_report.Watched``.
    """

    group: dist.ProcessGroup
    incarnation: int
    calls: int = 0
    passed: int = 0
    outside: int = 0
    between: bool = False
    mark: str = ""
    agreed: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    unasked: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    overlapped: set[tuple[str, ...]] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    reported: set[tuple[str, ...]] = field(default_factory=set)
    newest: ExchangePlan | None = None
    apart: str = ""
    page: CallPage | None = None
    _page_tried: bool = False
    _in_newest: int = 0
    _thread: int = field(default_factory=threading.get_ident)
    """The thread of the newest call."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    promised: int = -1
    told_inside: int = -1
    skipped: dict[int, str] = field(default_factory=dict)
    _counted: int | None = 0
    """What the backend had counted when the newest call returned. ``None`` after ``count``, until ``returned`` is
    called. ``returned`` is not called if the call raised, or if ``agreement.require`` called ``count``."""

    def __post_init__(self) -> None:
        self.store = CallStore(self.group, self.prefix)
        self._count, self.exact = counter(self.group)
        if not moves_nothing(self.group):
            call_report.watch(self)

    @property
    def prefix(self) -> str:
        return f"overlap_inductor/agree/{self.incarnation}"

    @property
    def medium(self) -> CallPage | CallStore:
        return self.store if self.page is None else self.page

    @property
    def place(self) -> int:
        """The newest call's place: the number of the group's collectives that this rank issued before the call."""
        return self.passed + self.outside

    @property
    def label(self) -> str:
        """The newest call's name in the store: its number or its place.

        Without a page, ranks of a GPU group publish only some calls. A rank may run code uncompiled while other ranks
        make an unpublished call for this code. The rank does not notice their call, and so does not skip its number. So
        numbers may differ between ranks. For this reason, the label of a call without a page is the place, if ``exact``
        is true.
        """
        return f"at{self.place}" if self.exact and self.page is None else str(self.calls)

    def count(self, collectives: int) -> None:
        """Count a call of a graph that holds ``collectives`` collectives of the group."""
        with self.lock:
            self._thread = threading.get_ident()
            self.calls += 1
            self.passed += self._in_newest
            self._in_newest, self.mark, self.between = collectives, "", False
            if self._counted is not None:
                new = self._count() - self._counted
                self.outside += new
                self.between, self._counted = new > 0, None

    def returned(self) -> None:
        """Note that the newest call has issued its collectives. Collectives after that are outside of the call."""
        self._counted = self._count()

    def reached(self) -> int | None:
        """See ``call_report.Watched``. Another thread calls this while it holds ``lock``."""
        if self._counted is None or not in_collective(self._thread):
            return None
        new = self._count() - self._counted
        return self.place + self._in_newest + new if new > 0 else None

    def inside(self) -> tuple[int, int] | None:
        """See ``call_report.Watched``. Another thread calls this while it holds ``lock``."""
        return (self.calls, self._count()) if self._counted is None and in_collective(self._thread) else None

    def level(self, places: Iterable[CallPlace]) -> None:
        """Set this rank's counts to the largest among the ranks' ``places`` of one call. All ranks do this together, so
        their counts become equal."""
        passed, place = self.passed, self.place
        for other in places:
            passed, place = max(passed, other.passed), max(place, other.place)
        self.passed, self.outside = passed, place - passed

    def publish(self, text: str, watched: bool = True) -> None:
        """Publish this rank's value ``text`` of the newest call. ``watched``: see ``CallStore``."""
        if self.page is None:
            self.store.publish(self.label, text, watched)
        else:
            self.page.publish(self.calls, text)

    def all_publish(self, text: str) -> bool:
        if self.page is None:
            return self.store.all_publish(self.label, text)
        return self.page.all_publish(self.calls, text)

    def published(self, rank: int, next_call: bool = False) -> str | None:
        """The value of ``rank`` for the newest call, or for the one after it; ``None`` if it has published none. Raises
        ``Overwritten``."""
        if self.page is not None:
            return self.page.published(self.calls + next_call, rank)
        if not next_call:
            return self.store.published(self.label, rank)
        later = f"at{self.place + self._in_newest}" if self.exact else str(self.calls + 1)
        return self.store.published(later, rank)

    def share_page(self) -> None:
        """Make the group's page, once. All ranks of the group call this together. Without shared memory ``page`` stays
        ``None``."""
        if self._page_tried:
            return
        self._page_tried = True
        try:
            self.page = shared_page(self.group, f"{self.prefix}/page")
        except NotOnAllRanks as error:
            log.info("overlap_inductor: plans are compared through the store of the group: %s", error)
        if self.exact:
            # The number of a call could differ between ranks (``label``). The place is the same on all.
            self.calls = self.place


STATES = Kind("record of calls", lambda owner: GroupState(owner.group, owner.incarnation))


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state of a group, made at first use. Raises ``OverlapError`` if the group was destroyed and its state is no
    longer held."""
    return STATES.of(group)

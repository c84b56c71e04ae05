# SPDX-License-Identifier: Apache-2.0
"""The values that the ranks of a group publish for each call, and the wait for the other ranks' values.

Two media carry the values: the group's store (``CallStore``), and memory that all ranks map (``call_page.CallPage``).
For each call and rank, they hold the rank's *value* and its verdict of each round. (The reasons of verdicts, and the
verdicts for which the page has no place, are always in the store: see ``say``.) The value describes the program that
the rank runs. It holds the digest of the rank's plan, and the place of this group among the plan's groups. It also
holds the number of the group's collectives in the rank's earlier calls, and ``!`` if the rank refuses to overlap.

Keys below ``overlap_inductor/agree/<incarnation>`` in the group's store::

    plan/<digest>            the plan's text, written once
    <call>/<rank>            the value
    <call>/<rank>/<round>    a verdict, with its reason
    <call>/same/<value>      how many ranks have published this value: one key to watch while all agree
    apart                    why overlap is disabled for the group
    page                     the file name of the group's call page
    here/<rank>              (of the default group) the rank compiles with overlap on
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch.distributed as dist

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.call_page import MOST_CHARACTERS
from overlap_inductor.runtime.call_page import MOST_ROUNDS
from overlap_inductor.runtime.call_page import CallPage
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_page import shared_page
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.torch_compat.distributed import default_group
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")

_PASSED_CHARACTERS = 18
"""Characters of a value that are reserved for its last number and the marks around this number. They are always
enough."""
KEPT_CALLS = 64
"""Number of newest calls whose keys stay in the store. In a CPU group no rank can be this many calls behind another,
because each call holds a collective, which blocks the host."""
EQUAL = "1"
"""The verdict of a rank that found no reason against the overlapped run."""
_LONGEST_PAUSE = 0.25
"""Longest pause between two reads of the other ranks' values, in seconds. The first pauses are much shorter."""
_SHORT = 2e-3
"""Seconds. Once pauses are longer than this, a rank also looks at each other rank's key and at the ``apart`` key."""
_LOOKS = 20
"""Number of times that a rank reads a page in a row before it yields its time slice."""
_SPIN = 2e-4
"""Seconds for which a rank that waits on a page only yields its time slices. After that it sleeps between two reads."""
_PATIENCE = 15.0
"""Seconds after which a rank that still waits logs which ranks it waits for."""
ABSENT = 60.0
"""Seconds after which a rank that has not announced itself (``announce``) is assumed to run without overlap."""


@dataclass(frozen=True)
class Outcome:
    """The result of comparing one call.

    Attributes:
        overlapped: True if every rank runs the plan with overlap.
        difference: why the ranks do not do so. Empty if they do, if this rank's plan overlaps nothing, or if the reason
            was reported before.
        fresh: True if all ranks agreed upon this plan in this call and not in an earlier one.
    """

    overlapped: bool
    difference: str = ""
    fresh: bool = False


class CallStore:
    """Values and verdicts of a group's calls in the group's store. It has the interface of ``CallPage``."""

    first_pause, growth = 1e-4, 1.5
    looks_cheaply = False

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._group, self._prefix, self._rank = group, prefix, group.rank()
        self._keys: dict[int, list[str]] = {}

    def publish(self, call: int, text: str) -> None:
        self._kept(call, self._key(call, self._rank), self._same(call, text))
        store = group_store(self._group)
        store.set(self._key(call, self._rank), text)
        store.add(self._same(call, text), 1)

    def all_publish(self, call: int, text: str) -> bool:
        return group_store(self._group).add(self._same(call, text), 0) == self._group.size()

    def published(self, call: int, rank: int) -> str | None:
        return self._get(self._key(call, rank))

    def say(self, call: int, number: int | str, text: str) -> None:
        key = f"{self._key(call, self._rank)}/{number}"
        self._kept(call, key)
        group_store(self._group).set(key, text)

    def said(self, call: int, number: int | str, rank: int) -> str | None:
        return self._get(f"{self._key(call, rank)}/{number}")

    def _kept(self, call: int, *keys: str) -> None:
        """Remember the ``keys`` of a call, and delete the keys of calls that are at least ``KEPT_CALLS``
        older."""
        self._keys.setdefault(call, []).extend(keys)
        for old in [c for c in self._keys if c <= call - KEPT_CALLS]:
            for key in self._keys.pop(old):
                group_store(self._group).delete_key(key)

    def _key(self, call: int, rank: int) -> str:
        return f"{self._prefix}/{call}/{rank}"

    def _same(self, call: int, text: str) -> str:
        return f"{self._prefix}/{call}/same/{text}"

    def _get(self, key: str) -> str | None:
        store = group_store(self._group)
        return store.get(key).decode() if store.check([key]) else None


@dataclass
class GroupState:
    """This rank's knowledge of the calls and plans of a live group.

    Attributes:
        incarnation: see ``group_state.Owner``.
        calls: number of calls of graphs with a collective of the group.
        passed: number of the group's collectives in the graphs of all calls before the newest one. It differs between
            ranks whose graph breaks are at different places.
        agreed: digests of plans that all ranks agreed to run.
        rejected: digests of plans on which the ranks differed, with the difference.
        tied: digests of agreed plans that all ranks compare at every call, on the pages of all groups of the plan.
        unasked: digests of agreed plans that all ranks run without comparing again.
        parts: digests of the plans of subgraphs, which are parts of agreed plans.
        overlapped: for each agreed plan, its collectives.
        told: digests of plans whose text this rank has published. Also ``here`` if this rank has announced itself.
        reported: tuples of digests of this rank and of other ranks whose difference was reported.
        newest: the plan that was agreed upon last; ``None`` before the first agreement.
        apart: why overlap is disabled for the group; ``""`` if it is not.
        page: the group's call page; ``None`` before the first agreement, or if the ranks share no memory.
    """

    group: dist.ProcessGroup
    incarnation: int
    calls: int = 0
    passed: int = 0
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

    def __post_init__(self) -> None:
        self.store = CallStore(self.group, self.prefix)

    @property
    def prefix(self) -> str:
        return f"overlap_inductor/agree/{self.incarnation}"

    @property
    def medium(self) -> CallPage | CallStore:
        return self.store if self.page is None else self.page

    def count(self, collectives: int) -> None:
        """Count a call of a graph that holds ``collectives`` collectives of the group."""
        self.calls += 1
        self.passed += self._in_newest
        self._in_newest = collectives

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


STATES = Kind("record of calls", lambda owner: GroupState(owner.group, owner.incarnation))


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state of a live group, made at first use. Raises ``OverlapError`` if the group was destroyed."""
    return STATES.of(group)


def peers(group: dist.ProcessGroup) -> list[int]:
    return [r for r in range(group.size()) if r != group.rank()]


def global_rank(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def timeout(group: dist.ProcessGroup) -> float:
    return group_timeout(group).total_seconds()


def constant(state: GroupState, plan: ExchangePlan) -> str:
    """The part that the values of all calls of ``plan`` share: the plan's digest, and which of the plan's groups this
    group is."""
    alias = plan.alias(state.group.group_name)
    text = f"{plan.digest}:{alias}"
    if len(text) <= MOST_CHARACTERS - _PASSED_CHARACTERS:
        return text
    return f"{plan.digest}:{hashlib.sha256(alias.encode()).hexdigest()[:16]}"


def value(state: GroupState, plan: ExchangePlan) -> str:
    """The value of a rank that runs ``plan`` in the call that was counted last."""
    return f"{constant(state, plan)}:{state.passed}"


def passed(text: str) -> int:
    """Number of the group's collectives in a rank's calls before the call for which it published the value ``text``."""
    return int(text.rstrip("!").rsplit(":", 1)[1])


def publish(states: Sequence[GroupState], plan: ExchangePlan, refused: bool = False) -> None:
    """Publish ``plan`` for the call that was counted last. ``refused``: True if this rank runs the plan's graph without
    overlap and does not wait for the others."""
    for state in states:
        if plan.digest not in state.told:
            state.told.add(plan.digest)
            group_store(state.group).set(f"{state.prefix}/plan/{plan.digest}", plan.to_json())
        state.medium.publish(state.calls, value(state, plan) + ("!" if refused else ""))


def values(state: GroupState, mine: ExchangePlan, deadline: float) -> dict[int, str]:
    """The values that the other ranks published for this call before ``deadline``, by rank of the group.

    The wait ends early in three cases:

    - overlap is off on a rank;
    - overlap is disabled for the group;
    - no plan of the group was agreed upon yet, and ``ABSENT`` seconds after this rank began to wait, none of the
      missing ranks has announced itself. A missing rank that was only slow finds the others' verdict and follows it.

    Args:
        mine: this rank's plan.
        deadline: in seconds of ``time.monotonic()``.

    Raises:
        Overwritten: a rank is so many calls ahead that its value of this call is gone.
    """
    medium, store, expected = state.medium, group_store(state.group), value(state, mine)
    waiting, found = peers(state.group), dict[int, str]()
    begun, said, pause = time.monotonic(), False, medium.first_pause
    while True:
        if medium.all_publish(state.calls, expected):
            return dict.fromkeys(peers(state.group), expected)
        now = time.monotonic()
        if medium.looks_cheaply or pause > _SHORT or now > deadline:
            for rank in list(waiting):
                if (text := medium.published(state.calls, rank)) is not None:
                    waiting.remove(rank)
                    found[rank] = text
            if not waiting:
                return found
        if pause > _SHORT or now > deadline:
            if store.check([f"{state.prefix}/apart"]):
                # The other ranks may have found this call's plans equal, before one of them disabled overlap at a later
                # call.
                if medium.all_publish(state.calls, expected):
                    return dict.fromkeys(peers(state.group), expected)
                state.apart = store.get(f"{state.prefix}/apart").decode()
            off = any(p.mode == "off" for p in plans(state, found, mine).values())
            if now > deadline or state.apart or off:
                return found
            unknown = state.newest is None and now - begun > ABSENT
            if unknown and not any(_is_here(global_rank(state.group, r)) for r in waiting):
                return found
            if not said and now - begun > _PATIENCE and mine.digest not in state.agreed:
                said = True
                ranks = ", ".join(str(global_rank(state.group, r)) for r in waiting)
                log.warning(
                    "overlap_inductor: rank %d waits for rank %s to compile the same graph", dist.get_rank(), ranks
                )
        time.sleep(pause)
        pause = _next_pause(medium, pause, now - begun)


def soon(page: CallPage, call: int, text: str) -> bool:
    """Whether all ranks publish ``text`` soon: within ``_LOOKS`` reads in a row, or within the ``_SPIN`` seconds after
    these reads. Each read compares the entries of all ranks at once."""
    # Ranks that run in step find each other's entries in these reads, without a system call.
    if any(page.all_publish(call, text) for _ in range(_LOOKS)):
        return True
    end = time.perf_counter() + _SPIN
    while time.perf_counter() < end:
        time.sleep(0)
        if page.all_publish(call, text):
            return True
    return False


def _next_pause(medium: CallPage | CallStore, pause: float, waited: float) -> float:
    if pause:
        return min(pause * medium.growth, _LONGEST_PAUSE)
    return 0.0 if waited < _SPIN else _SPIN / 10


def plans(state: GroupState, texts: Mapping[int, str], mine: ExchangePlan) -> dict[int, ExchangePlan]:
    """The plans that the values ``texts`` name, by rank of the group. Plans that this rank lacks are read from the
    store."""
    store, known = group_store(state.group), {mine.digest: mine}
    digests = {rank: text.split(":")[0] for rank, text in texts.items()}
    for digest in set(digests.values()) - {mine.digest}:
        known[digest] = ExchangePlan.from_json(store.get(f"{state.prefix}/plan/{digest}").decode())
    return {rank: known[digest] for rank, digest in digests.items()}


def plans_now(state: GroupState, mine: ExchangePlan, calls: Sequence[int]) -> dict[int, ExchangePlan]:
    """The plans that other ranks have published for any of ``calls``, by global rank. Does not wait."""
    found = {}
    for rank in peers(state.group):
        for call in calls:
            try:
                text = state.medium.published(call, rank)
            except Overwritten:
                continue
            if text is not None:
                found[rank] = text
    return {global_rank(state.group, r): p for r, p in plans(state, found, mine).items()}


def say(state: GroupState, number: int, text: str, kind: str = "") -> None:
    """Publish this rank's verdict ``text`` in round ``number`` of this call. ``kind`` distinguishes several series of
    rounds of one call. Rounds with a ``kind`` go through the store, and so do those that have no place on the page."""
    if kind or state.page is None or number >= MOST_ROUNDS:
        state.store.say(state.calls, f"{kind}{number}", text)
        return
    if text != EQUAL:
        # The reason does not fit on the page, so it goes through the store.
        state.store.say(state.calls, number, text)
    state.page.say(state.calls, number, text[0])


def said(state: GroupState, rank: int, number: int, deadline: float, kind: str = "") -> str | None:
    """The verdict of ``rank`` in round ``number`` of this call, or ``None`` if it gives none before ``deadline``.

    Raises:
        Overwritten: the rank is so many calls ahead that its verdict of this call is gone.
    """
    medium: CallPage | CallStore = state.store if kind or number >= MOST_ROUNDS else state.medium
    begun, pause = time.monotonic(), medium.first_pause
    while True:
        if isinstance(medium, CallPage):
            text = medium.said(state.calls, number, rank)
        else:
            text = medium.said(state.calls, f"{kind}{number}", rank)
        if text is not None and (text == EQUAL or medium is state.store):
            return text
        if text is not None:
            # Wait for the reason, which may reach the store after the verdict reaches the page: a write to the store is
            # not acknowledged.
            medium, pause = state.store, state.store.first_pause
        now = time.monotonic()
        if now > deadline:
            return None
        time.sleep(pause)
        pause = _next_pause(medium, pause, now - begun)


def part(state: GroupState, why: str) -> None:
    """Disable overlap for the group permanently, and publish the reason ``why`` to the ranks that wait."""
    state.apart = why
    group_store(state.group).set(f"{state.prefix}/apart", why)


def announce() -> None:
    """Publish once that this rank compiles with overlap on. The other ranks wait longer for the plans of a rank that
    has announced itself."""
    world = default_group()
    if world is None or moves_nothing(world):
        return
    state = state_of(world)
    if "here" not in state.told:
        state.told.add("here")
        group_store(world).set(_here(state, world.rank()), "1")


def _here(world: GroupState, rank: int) -> str:
    return f"{world.prefix}/here/{rank}"


def _is_here(rank: int) -> bool:
    world = default_group()
    return world is not None and group_store(world).check([_here(state_of(world), rank)])

"""What the ranks of a group publish for each call, and how they wait for each other's.

Two media carry it: the group's store (``CallStore``), and memory that all ranks map (``call_page.CallPage``). Both hold
for each call and rank what that rank runs, the *value*: the digest of its plan, which of the plan's groups this one is,
how many collectives of the group its calls before this one held, and ``!`` where the rank refuses to overlap; and the
rank's verdict of each round.

Keys, below ``overlap_inductor/agree/<incarnation>`` in the group's store::

    plan/<digest>            the plan's text, once
    <call>/<rank>            the value
    <call>/<rank>/<round>    a verdict, with its reason
    <call>/same/<value>      how many ranks have published this value: one key to watch while all agree
    apart                    why overlap is disabled for the group
    page                     where the page of the group's calls lies
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
from overlap_inductor.runtime.call_page import CallPage
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_page import shared_page
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")

_PASSED_CHARACTERS = 18
"""Of a value: its last number, which never has so many digits, and what stands around it."""
KEPT_CALLS = 64
"""Calls whose keys stay in the store. No rank can be so many calls behind another: each holds a collective."""
EQUAL = "1"
"""The verdict of a rank that has found nothing against the overlapped run."""
_LONGEST_PAUSE = 0.25
"""Seconds between two looks at what the others have published; the first looks come much sooner."""
_SHORT = 2e-3
"""A pause from which on a rank looks at each other rank, too."""
_LOOKS = 20
"""At a page, one behind the other, before a rank gives up its time slice."""
_SPIN = 2e-4
"""Seconds for which a rank that waits on a page gives up its time slice only."""
_PATIENCE = 15.0
"""Seconds after which a rank that still waits says for whom."""
ABSENT = 60.0
"""Seconds after which a rank that has not announced that it compiles with overlap on is taken for one that never
will."""


@dataclass(frozen=True)
class Outcome:
    """``overlapped``: every rank runs the same exchange; ``fresh`` where all ranks have found so just now. Else
    ``difference`` says why not; it is empty where that was said before."""

    overlapped: bool
    difference: str = ""
    fresh: bool = False


class CallStore:
    """What the ranks of a group say of their calls, in the group's store. The interface is ``CallPage``'s."""

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
        """Note the ``keys`` of a call, and delete those of old ones."""
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
    """What this rank knows of a live group.

    Attributes:
        calls: calls of graphs with a collective of the group.
        passed: collectives of the group in the graphs of the calls before the newest one. Ranks whose graphs are broken
            at different places count other calls, but as many collectives.
        agreed / rejected: digests of plans that all ranks ran alike, and of those that differed (with the difference).
        tied: digests of agreed plans that all ranks compare at every call, on the pages of all groups of the plan.
        unasked: digests of agreed plans that this rank, as all others, runs without a look at what the others run.
        parts: digests of plans that are parts of an agreed one: those of subgraphs.
        overlapped: the collectives of agreed plans.
        told: digests whose plans this rank has published.
        reported: digests, this rank's and others', whose difference was said.
        newest: the plan agreed upon last; ``None`` while nothing of the group is overlapped.
        apart: why overlap is disabled for the group.
        page: of the group's calls; ``None`` before the first agreement, and where the ranks share no memory.
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
        """Count a call of a graph that holds so many collectives of the group."""
        self.calls += 1
        self.passed += self._in_newest
        self._in_newest = collectives

    def share_page(self) -> None:
        """Make the group's page, once; all its ranks call this together."""
        if self._page_tried:
            return
        self._page_tried = True
        try:
            self.page = shared_page(self.group, f"{self.prefix}/page")
        except NotOnAllRanks as error:
            log.info("overlap_inductor: plans are compared through the store of the group: %s", error)


_STATE: dict[str, GroupState] = {}


def state_of(group: dist.ProcessGroup) -> GroupState:
    """State of a live group. A destroyed group whose name is used again gets a new one, and new keys in the store."""
    known = _STATE.get(group.group_name)
    if known is None or known.group is not group:
        known = GroupState(group, 0 if known is None else known.incarnation + 1)
        _STATE[group.group_name] = known
    return known


def peers(group: dist.ProcessGroup) -> list[int]:
    return [r for r in range(group.size()) if r != group.rank()]


def global_rank(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def timeout(group: dist.ProcessGroup) -> float:
    return group_timeout(group).total_seconds()


def constant(state: GroupState, plan: ExchangePlan) -> str:
    """What is alike in the values of all calls of ``plan``: its digest, and which of the plan's groups this one is."""
    alias = plan.alias(state.group.group_name)
    text = f"{plan.digest}:{alias}"
    if len(text) <= MOST_CHARACTERS - _PASSED_CHARACTERS:
        return text
    return f"{plan.digest}:{hashlib.sha256(alias.encode()).hexdigest()[:16]}"


def value(state: GroupState, plan: ExchangePlan) -> str:
    """What a rank publishes that runs ``plan`` in the call that was counted last."""
    return f"{constant(state, plan)}:{state.passed}"


def passed(text: str) -> int:
    """How many collectives the calls held that the rank made before it published the value ``text``."""
    return int(text.rstrip("!").rsplit(":", 1)[1])


def publish(states: Sequence[GroupState], plan: ExchangePlan, refused: bool = False) -> None:
    """Publish ``plan`` for the call that was counted last; ``refused``: this rank runs it without overlap, whatever the
    others do."""
    for state in states:
        if plan.digest not in state.told:
            state.told.add(plan.digest)
            group_store(state.group).set(f"{state.prefix}/plan/{plan.digest}", plan.to_json())
        state.medium.publish(state.calls, value(state, plan) + ("!" if refused else ""))


def values(state: GroupState, mine: ExchangePlan, deadline: float) -> dict[int, str]:
    """What the other ranks of the group published for this call, by rank of the group; of those that did before
    ``deadline``.

    Nobody is waited for any longer once overlap is off on a rank, or disabled for the group. Nor is, while no plan of
    the group was agreed upon, a rank that has not announced itself ``ABSENT`` seconds after this one began to wait:
    where it is only slow, it finds the verdict of the others and does as they do.

    Raises:
        Overwritten: a rank is too many calls ahead to be asked.
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
                # (All may have found this call alike, but for this slow rank, before one of them disabled overlap.)
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
    """Whether all ranks have published ``text``, or do so in less time than a look at each of them takes."""
    # (Ranks that run side by side meet here, without a call of the system.)
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
    """The plans behind what was published, by rank of the group."""
    store, known = group_store(state.group), {mine.digest: mine}
    digests = {rank: text.split(":")[0] for rank, text in texts.items()}
    for digest in set(digests.values()) - {mine.digest}:
        known[digest] = ExchangePlan.from_json(store.get(f"{state.prefix}/plan/{digest}").decode())
    return {rank: known[digest] for rank, digest in digests.items()}


def plans_now(state: GroupState, mine: ExchangePlan, calls: Sequence[int]) -> dict[int, ExchangePlan]:
    """The plans that others have published for any of ``calls``, by global rank, without waiting."""
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
    """Publish the verdict of one round of this call. ``kind`` keeps the rounds of one call apart; those that have one
    go through the store."""
    if kind or state.page is None:
        state.store.say(state.calls, f"{kind}{number}", text)
        return
    if text != EQUAL:
        # (The reason has no room on the page.)
        state.store.say(state.calls, number, text)
    state.page.say(state.calls, number, text[0])


def said(state: GroupState, rank: int, number: int, deadline: float, kind: str = "") -> str | None:
    """The verdict of another rank in one round of this call; ``None`` where it gives none before ``deadline``.

    Raises:
        Overwritten: that rank is too many calls ahead to be asked.
    """
    medium: CallPage | CallStore = state.store if kind else state.medium
    begun, pause = time.monotonic(), medium.first_pause
    while True:
        if isinstance(medium, CallPage):
            text = medium.said(state.calls, number, rank)
        else:
            text = medium.said(state.calls, f"{kind}{number}", rank)
        if text is not None and (text == EQUAL or medium is state.store):
            return text
        if text is not None:
            # (The reason is on its way: a store is told without an answer, and the page is faster.)
            medium, pause = state.store, state.store.first_pause
        now = time.monotonic()
        if now > deadline:
            return None
        time.sleep(pause)
        pause = _next_pause(medium, pause, now - begun)


def part(state: GroupState, why: str) -> None:
    """Disable overlap for the group, and tell the ranks that wait."""
    state.apart = why
    group_store(state.group).set(f"{state.prefix}/apart", why)


def announce() -> None:
    """Tell the other ranks, once, that this one compiles with overlap on: they wait longer for its plans than for a
    silent rank's."""
    if not dist.is_available() or not dist.is_initialized() or moves_nothing(dist.group.WORLD):  # type: ignore[arg-type]
        return
    world = state_of(dist.group.WORLD)  # type: ignore[arg-type]
    if "here" not in world.told:
        world.told.add("here")
        group_store(world.group).set(_here(dist.get_rank()), "1")


def _here(rank: int) -> str:
    return f"{state_of(dist.group.WORLD).prefix}/here/{rank}"  # type: ignore[arg-type]


def _is_here(rank: int) -> bool:
    return group_store(dist.group.WORLD).check([_here(rank)])  # type: ignore[arg-type]

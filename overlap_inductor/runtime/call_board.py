# SPDX-License-Identifier: Apache-2.0
"""The values that the ranks of a group publish for their calls, and the wait for the other ranks' values.

A rank's *value* of a call names the rank's plan (``constant``) and the *place* of the call (``call_place``). The
place is the number of the group's collectives that the rank issued before the call. A call may also have *rounds*. In
each round, a rank publishes a *verdict*: whether it knows a reason against the overlapped run (``agreement``). Values
and verdicts go through one of two media: the group's store (``CallStore``), or the group's *page*, memory that all
ranks map (``call_page.CallPage``). Reasons of verdicts are always in the store.

Keys below ``overlap_inductor/agree/<incarnation>`` in the group's store. ``<incarnation>`` tells apart groups that
had the same name one after the other::

    plan/<digest>            the plan's text, written once
    slot<slot>/<rank>        the call's number and the value; <slot> is the number modulo ``CALLS``
    <call>/<rank>            the value, if ``GroupState.label`` is no number; <call> is the label
    <call>/<rank>/<round>    a verdict, with its reason
    <call>/same/<value>      how many ranks have published this value: one key to watch while all agree. Calls without
                             overlap do not count
    apart                    why overlap is disabled for the group
    page                     the file name of the group's call page
    here/<rank>              the rank compiles with overlap on (a key of the default group only)
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence

import torch.distributed as dist

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.exchange import difference
from overlap_inductor.runtime import call_report
from overlap_inductor.runtime.call_page import MOST_CHARACTERS
from overlap_inductor.runtime.call_page import MOST_ROUNDS
from overlap_inductor.runtime.call_page import CallPage
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_place import MOVED
from overlap_inductor.runtime.call_place import REFUSED
from overlap_inductor.runtime.call_place import SKIPPED
from overlap_inductor.runtime.call_place import CallPlace
from overlap_inductor.runtime.call_place import Order
from overlap_inductor.runtime.call_place import order
from overlap_inductor.runtime.call_state import GroupState
from overlap_inductor.runtime.call_state import state_of
from overlap_inductor.runtime.call_store import CallStore
from overlap_inductor.torch_compat.distributed import default_group
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")

_COUNTS_CHARACTERS = 32
"""Characters of a value that are reserved for ``CallPlace``'s ``passed`` and ``place`` (14 digits each), their colons,
and the mark: at most 31."""
EQUAL, ONCE = "1", "2"
"""Two verdicts. ``EQUAL``: nothing is against the overlapped run. ``ONCE``: all ranks run the plain program, in
this call alone."""
_LONGEST_PAUSE = 0.25
"""Longest pause between two reads of the other ranks' values, in seconds."""
_SHORT = 2e-3
"""Seconds. If pauses are longer, a rank also looks at the keys of all other ranks and at key ``apart``."""
_LOOKS = 20
"""How often a waiting rank reads a page before it first yields its time slice."""
_SPIN = 2e-4
"""Seconds for which a rank that waits on a page only yields its time slices. After that it sleeps between reads."""
_SOON = 2e-2
"""Longest wait in ``soon``, in seconds."""
_PATIENCE = 15.0
"""Seconds after which a rank that still waits logs which ranks it waits for."""
ABSENT = 60.0
"""Seconds after which a rank that has not announced itself (``announce``) is assumed to run without overlap."""


def peers(group: dist.ProcessGroup) -> list[int]:
    return [r for r in range(group.size()) if r != group.rank()]


def global_rank(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def timeout(group: dist.ProcessGroup) -> float:
    return group_timeout(group).total_seconds()


def constant(state: GroupState, plan: ExchangePlan) -> str:
    """The part that the values of all calls of ``plan`` share. It holds the plan's digest, which of the plan's groups
    this group is, and how many of the plan's collectives are in this group."""
    alias, count = plan.alias(state.group.group_name), plan.count_in(state.group.group_name)
    text = f"{plan.digest}:{alias}:{count}"
    if len(text) <= MOST_CHARACTERS - _COUNTS_CHARACTERS:
        return text
    return f"{plan.digest}:{hashlib.sha256(alias.encode()).hexdigest()[:12]}:{count}"


def value(state: GroupState, plan: ExchangePlan) -> CallPlace:
    """This rank's value if it runs ``plan`` in the call that was counted last."""
    return CallPlace(constant(state, plan), state.passed, state.place, state.mark)


def order_of(state: GroupState, plan: ExchangePlan, text: str) -> Order:
    """How the call for which another rank published ``text`` stands to this rank's newest call, which runs ``plan``."""
    theirs = CallPlace.parsed(text)
    if theirs.mark != SKIPPED and theirs.place < state.promised:
        # This rank has reported that it does not join that call.
        return Order.EARLIER
    return order(value(state, plan), theirs, state.exact)


def is_partner(state: GroupState, plan: ExchangePlan, text: str) -> bool:
    """Whether a rank that published ``text`` runs the same plan in the same call, and waits for verdicts."""
    theirs = CallPlace.parsed(text)
    same = order_of(state, plan, text) is Order.SAME and theirs.constant == constant(state, plan)
    return same and theirs.mark != REFUSED


def publish(states: Sequence[GroupState], plan: ExchangePlan, refused: bool = False) -> None:
    """Publish ``plan`` for the call that was counted last. ``refused``: this rank runs the graph without overlap and
    does not wait for the others."""
    for state in states:
        if plan.digest not in state.told:
            state.told.add(plan.digest)
            group_store(state.group).set(f"{state.prefix}/plan/{plan.digest}", plan.to_json())
        if refused:
            state.mark = REFUSED
        # Ranks wait together only for values of a plan with overlap, and in mode ``strict``.
        state.publish(value(state, plan).text, watched=plan.overlaps or plan.mode == "strict")


def skip(state: GroupState, plan: ExchangePlan, found: Mapping[int, str]) -> None:
    """Publish that this rank ran uncompiled the call that others published under this call's number, and go on to the
    next number. In the skipped call, the others run their plain programs. ``found``: values that other ranks published
    for the skipped call."""
    state.skipped = dict(found)
    state.mark = SKIPPED
    state.publish(value(state, plan).text)
    for number in range(1 + max(1, sum(map(len, plan.groups)))):
        say(state, number, f"{ONCE}rank {dist.get_rank()} ran it uncompiled")
    state.calls += 1
    state.mark = MOVED


def catch_up(states: Sequence[GroupState], plan: ExchangePlan) -> None:
    """Before a call in which this rank does not wait for the others' values, skip the calls of other ranks that this
    rank ran uncompiled. Does not wait: it skips only calls that a rank has published."""
    for state in states:
        # If this rank ran no collective between its two newest calls, it ran none of the others' calls uncompiled.
        while state.between and (found := _earlier(state, plan, peers(state.group))):
            skip(state, plan, found)


def _earlier(state: GroupState, plan: ExchangePlan, ranks: Sequence[int]) -> dict[int, str]:
    """``{rank: value}`` for one of ``ranks`` that has published, under this call's number, a call that this rank ran
    uncompiled. Empty if there is none."""
    for rank in ranks:
        try:
            text = state.published(rank)
        except Overwritten:
            continue
        if text is not None and order_of(state, plan, text) is Order.EARLIER:
            return {rank: text}
    return {}


def values(state: GroupState, mine: ExchangePlan, deadline: float) -> dict[int, str]:
    """The values that the other ranks published for this call before ``deadline``, by rank of the group. Calls that
    this rank ran uncompiled are skipped (``skip``).

    A *missing* rank has published no value yet. The wait ends early in five cases:

    - overlap is off on a rank, at this call;
    - overlap is disabled for the group;
    - this rank has skipped a call by mistake (``_skipped_by_mistake``);
    - each missing rank has reported that it is beyond this call (``call_report``). The result then holds a value with
      the mark ``SKIPPED`` in place of the rank's own value;
    - no plan of the group was agreed upon yet, and no missing rank has announced itself within ``ABSENT`` seconds.

    Args:
        mine: this rank's plan.
        deadline: in seconds of ``time.monotonic()``.

    Raises:
        Overwritten: a rank is so many calls ahead that its value of this call is gone.
    """
    medium, store, expected = state.medium, group_store(state.group), value(state, mine).text
    waiting, found = peers(state.group), dict[int, str]()
    begun, said, pause = time.monotonic(), False, medium.first_pause
    while True:
        if state.all_publish(expected):
            return dict.fromkeys(peers(state.group), expected)
        now = time.monotonic()
        if medium.looks_cheaply or pause > _SHORT or now > deadline:
            if earlier := _read(state, mine, waiting, found):
                skip(state, mine, earlier)
                publish([state], mine)
                expected, waiting, found = value(state, mine).text, peers(state.group), {}
                pause = medium.first_pause
                continue
            if not waiting:
                return found
        if pause > _SHORT or now > deadline:
            if store.check([f"{state.prefix}/apart"]):
                # All ranks may have published equal values for this call, before one of them disabled overlap at a
                # later call.
                if state.all_publish(expected):
                    return dict.fromkeys(peers(state.group), expected)
                if not _read(state, mine, waiting, found) and not waiting:
                    return found
                state.apart = store.get(f"{state.prefix}/apart").decode()
            off = any(p.mode == "off" for p in plans(state, found, mine).values())
            if now > deadline or state.apart or off:
                return found
            long = now - begun > 2 * call_report.INTERVAL
            if _are_beyond(state, mine, waiting, found) or (long and _skipped_by_mistake(state, mine)):
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


def _read(state: GroupState, mine: ExchangePlan, waiting: list[int], found: dict[int, str]) -> dict[int, str]:
    """Move the ranks that have published their value from ``waiting`` to ``found``. If one of them
    published a call that this rank ran uncompiled, stops there and returns ``{rank: value}`` for it. Otherwise returns
    an empty dict. Raises ``Overwritten``."""
    for rank in list(waiting):
        text = state.published(rank)
        if text is None:
            continue
        stands = order_of(state, mine, text)
        if stands is Order.EARLIER:
            return {rank: text}
        if stands is Order.SAME and CallPlace.parsed(text).place != state.place:
            # Only the places differ. So the other rank may be in this call, unless it has reported a later place.
            place = call_report.place_of(state, rank)
            text = _absent(state, mine, place) if place > state.place else text
        waiting.remove(rank)
        found[rank] = text
    return {}


def _skipped_by_mistake(state: GroupState, mine: ExchangePlan) -> bool:
    """Whether a rank is still inside a collective of the call that this rank has skipped. If so, this rank cannot have
    run that call uncompiled, and overlap is disabled for the group."""
    stuck = [r for r in state.skipped if state.mark == MOVED and call_report.call_of(state, r) == state.calls - 1]
    if not stuck:
        return False
    others = {global_rank(state.group, r): p for r, p in plans(state, state.skipped, mine).items()}
    why = difference(mine, others) or f"rank {global_rank(state.group, stuck[0])} runs the same plan in another call"
    part(state, f"{why} (the ranks count different numbers of collectives of group {state.group.group_name!r})")
    log.warning(
        "overlap_inductor: rank %d and other ranks do not make the same transfers, so all of them run without overlap:"
        " %s",
        dist.get_rank(),
        state.apart,
    )
    return True


def _are_beyond(state: GroupState, mine: ExchangePlan, waiting: list[int], found: dict[int, str]) -> bool:
    """Whether each rank in ``waiting`` has reported a place beyond the beginning of this call. If so, writes a value
    for each of them to ``found``."""
    places = {rank: call_report.place_of(state, rank) for rank in waiting}
    if any(place <= state.place for place in places.values()):
        return False
    found.update({rank: _absent(state, mine, place) for rank, place in places.items()})
    return True


def _absent(state: GroupState, mine: ExchangePlan, place: int) -> str:
    return CallPlace(constant(state, mine), state.passed, place, SKIPPED).text


def soon(page: CallPage, call: int, text: str) -> bool:
    """Whether all ranks publish ``text`` within ``_SOON`` seconds. Ends early if a rank publishes another value.

    The other ranks see the last rank's value within microseconds. So all ranks go on at nearly the same time.
    """
    look = page.watcher(call, text)
    # If the ranks begin this call at nearly the same time, they find each other's entries here, without a system call.
    if any(look() for _ in range(_LOOKS)):
        return True
    begun, waited = time.perf_counter(), 0.0
    while waited < _SOON:
        time.sleep(0.0 if waited < _SPIN else _SPIN / 10)
        if look():
            return True
        if page.differs(call, text):
            return False
        waited = time.perf_counter() - begun
    return False


def _next_pause(medium: CallPage | CallStore, pause: float, waited: float) -> float:
    if pause:
        return min(pause * medium.growth, _LONGEST_PAUSE)
    return 0.0 if waited < _SPIN else _SPIN / 10


def plans(state: GroupState, texts: Mapping[int, str], mine: ExchangePlan) -> dict[int, ExchangePlan]:
    """The plans that the values ``texts`` name, by rank of the group. Unknown plans are read from the store."""
    store, known = group_store(state.group), {mine.digest: mine}
    digests = {rank: text.split(":")[0] for rank, text in texts.items()}
    for digest in set(digests.values()) - {mine.digest}:
        known[digest] = ExchangePlan.from_json(store.get(f"{state.prefix}/plan/{digest}").decode())
    return {rank: known[digest] for rank, digest in digests.items()}


def plans_now(state: GroupState, mine: ExchangePlan) -> dict[int, ExchangePlan]:
    """The plans that other ranks have published for the newest call or the one after it, by global rank. Does not
    wait."""
    found = {}
    for rank in peers(state.group):
        for next_call in (False, True):
            try:
                text = state.published(rank, next_call)
            except Overwritten:
                continue
            if text is not None:
                found[rank] = text
    return {global_rank(state.group, r): p for r, p in plans(state, found, mine).items()}


def say(state: GroupState, number: int, text: str, kind: str = "") -> None:
    """Publish this rank's verdict ``text`` in round ``number`` of this call. ``kind`` names a further series of rounds
    of the call, which goes through the store."""
    if kind or state.page is None or number >= MOST_ROUNDS:
        state.store.say(state.label, f"{kind}{number}", text)
        return
    if text != EQUAL:
        # The page has no room for the reason.
        state.store.say(state.label, number, text)
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
            text = medium.said(state.label, f"{kind}{number}", rank)
        if text is not None and (text == EQUAL or medium is state.store):
            return text
        if text is not None:
            # Wait for the reason, which may reach the store after the verdict has reached the page.
            medium, pause = state.store, state.store.first_pause
        now = time.monotonic()
        if now > deadline:
            return None
        time.sleep(pause)
        pause = _next_pause(medium, pause, now - begun)


def part(state: GroupState, why: str) -> None:
    """Disable overlap for the group permanently, and publish the reason ``why``."""
    state.apart = why
    group_store(state.group).set(f"{state.prefix}/apart", why)


def announce() -> None:
    """Publish once that this rank compiles with overlap on. The other ranks wait longer for the plans of such a
    rank."""
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

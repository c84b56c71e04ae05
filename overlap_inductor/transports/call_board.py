"""The store's side of the agreement: what ranks publish for each call of a group, and how they wait for each other's.

Keys, below ``overlap_inductor/agree/<incarnation>`` in the group's store::

    plan/<digest>            the plan's text, once
    <call>/<rank>            digest, the group's place in the plan, and "!" where the rank refuses to overlap
    <call>/<rank>/<round>    a verdict
    <call>/same/<value>      how many ranks have published this value: one key to watch while all agree
    apart                    why overlap is disabled for the group
    here/<rank>              (of the default group) the rank compiles with overlap on
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch.distributed as dist

from overlap_inductor.exchange import ExchangePlan
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")

KEPT_CALLS = 64
"""Calls whose keys stay in the store. No rank can be so many calls behind another: each holds a collective."""
MOST_ROUNDS = 5
_LONGEST_PAUSE = 0.25
"""Seconds between two looks at what the others have published; the first looks come much sooner."""
_SHORT = 2e-3
"""A pause from which on a rank looks at each other rank, too."""
_PATIENCE = 15.0
"""Seconds after which a rank that still waits says for whom."""
ABSENT = 60.0
"""Seconds after which a rank that has not announced that it compiles with overlap on is taken for one that never will."""


@dataclass(frozen=True)
class Outcome:
    """``overlapped``: every rank runs the same exchange; ``fresh`` where all ranks have found so just now. Else
    ``difference`` says why not; it is empty where that was said before."""

    overlapped: bool
    difference: str = ""
    fresh: bool = False


@dataclass
class GroupState:
    """What this rank knows of a live group.

    Attributes:
        calls: calls of graphs with a collective of the group.
        agreed / rejected: digests of plans that all ranks ran alike, and of those that differed (with the difference).
        parts: digests of plans that are parts of an agreed one: those of subgraphs.
        overlapped: the collectives of agreed plans.
        told: digests whose plans this rank has published.
        reported: digests, this rank's and others', whose difference was said.
        newest: the plan agreed upon last; ``None`` while nothing of the group is overlapped.
        apart: why overlap is disabled for the group.
    """

    group: dist.ProcessGroup
    incarnation: int
    calls: int = 0
    agreed: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    overlapped: set[tuple[str, ...]] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    reported: set[tuple[str, ...]] = field(default_factory=set)
    newest: ExchangePlan | None = None
    apart: str = ""

    @property
    def prefix(self) -> str:
        return f"overlap_inductor/agree/{self.incarnation}"

    def key(self, call: int, rank: int) -> str:
        return f"{self.prefix}/{call}/{rank}"

    def same(self, call: int, text: str) -> str:
        return f"{self.prefix}/{call}/same/{text}"


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


def value(state: GroupState, plan: ExchangePlan) -> str:
    """What a rank publishes that runs ``plan``: its digest, and which of the plan's groups this one is."""
    return f"{plan.digest}:{plan.alias(state.group.group_name)}"


def publish(states: Sequence[GroupState], plan: ExchangePlan, refused: bool = False) -> None:
    """Publish ``plan`` for the call that was counted last; ``refused``: this rank runs it without overlap, whatever the others do."""
    for state in states:
        store, rank, call = group_store(state.group), state.group.rank(), state.calls
        if plan.digest not in state.told:
            state.told.add(plan.digest)
            store.set(f"{state.prefix}/plan/{plan.digest}", plan.to_json())
        text = value(state, plan) + ("!" if refused else "")
        store.set(state.key(call, rank), text)
        store.add(state.same(call, text), 1)
        old = call - KEPT_CALLS
        if old > 0:
            for suffix in ("", *(f"/{number}" for number in range(MOST_ROUNDS))):
                store.delete_key(state.key(old, rank) + suffix)
            store.delete_key(state.same(old, text))


def values(state: GroupState, mine: ExchangePlan, deadline: float) -> dict[int, str]:
    """What the other ranks of the group published for this call, by rank of the group; of those that did before ``deadline``.

    Nobody is waited for any longer once overlap is off on a rank, or disabled for the group. Nor is a rank that has not
    announced itself ``ABSENT`` seconds after this one began to wait: where it is only slow, it finds the verdict of the
    others and does as they do.
    """
    store, expected = group_store(state.group), value(state, mine)
    waiting, found = peers(state.group), dict[int, str]()
    begun, said, pause = time.monotonic(), False, 1e-4
    while True:
        if store.add(state.same(state.calls, expected), 0) == state.group.size():
            return dict.fromkeys(peers(state.group), expected)
        now = time.monotonic()
        if pause > _SHORT or now > deadline:
            for rank in [r for r in waiting if store.check([state.key(state.calls, r)])]:
                waiting.remove(rank)
                found[rank] = store.get(state.key(state.calls, rank)).decode()
            if store.check([f"{state.prefix}/apart"]):
                state.apart = store.get(f"{state.prefix}/apart").decode()
            if (
                not waiting
                or now > deadline
                or state.apart
                or any(p.mode == "off" for p in plans(state, found, mine).values())
            ):
                return found
            if now - begun > ABSENT and not any(_is_here(global_rank(state.group, r)) for r in waiting):
                return found
            if not said and now - begun > _PATIENCE:
                said = True
                ranks = ", ".join(str(global_rank(state.group, r)) for r in waiting)
                log.warning(
                    "overlap_inductor: rank %d waits for rank %s to compile the same graph", dist.get_rank(), ranks
                )
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def plans(state: GroupState, texts: Mapping[int, str], mine: ExchangePlan) -> dict[int, ExchangePlan]:
    """The plans behind what was published, by rank of the group."""
    store, known = group_store(state.group), {mine.digest: mine}
    digests = {rank: text.split(":")[0] for rank, text in texts.items()}
    for digest in set(digests.values()) - {mine.digest}:
        known[digest] = ExchangePlan.from_json(store.get(f"{state.prefix}/plan/{digest}").decode())
    return {rank: known[digest] for rank, digest in digests.items()}


def plans_now(state: GroupState, mine: ExchangePlan, calls: Sequence[int]) -> dict[int, ExchangePlan]:
    """The plans that others have published for any of ``calls``, by global rank, without waiting."""
    store = group_store(state.group)
    keys = {(rank, call): state.key(call, rank) for rank in peers(state.group) for call in calls}
    found = {rank: store.get(key).decode() for (rank, _), key in keys.items() if store.check([key])}
    return {global_rank(state.group, r): p for r, p in plans(state, found, mine).items()}


def say(state: GroupState, suffix: str, text: str) -> None:
    """Publish something more about this call."""
    group_store(state.group).set(state.key(state.calls, state.group.rank()) + suffix, text)


def said(state: GroupState, rank: int, suffix: str, deadline: float) -> str | None:
    """What another rank ``say``s about this call; ``None`` where it does not before ``deadline``."""
    store, key, pause = group_store(state.group), state.key(state.calls, rank) + suffix, 1e-4
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return store.get(key).decode()


def part(state: GroupState, why: str) -> None:
    """Disable overlap for the group, and tell the ranks that wait."""
    state.apart = why
    group_store(state.group).set(f"{state.prefix}/apart", why)


def announce() -> None:
    """Tell the other ranks, once, that this one compiles with overlap on: they wait longer for its plans than for a silent rank's."""
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

"""Agreement: the ranks of a group compare what they exchange before an overlap op of a graph moves data.

A pass never communicates, because a cache hit on one rank would leave the others waiting. So the comparison is the first act of a graph's
call, before it reads or writes anything. Every rank writes the digest of its plan under the number of the call (of graphs with a collective of
that group), reads the others' with a deadline, and says whether it can go on. Only where all ranks say yes are overlap ops run::

    call n:   publish digest                     a rank that overlaps nothing goes on here
              equal = all digests of call n are mine
              for each round: publish equal; equal = all ranks with my digest say equal
              equal -> overlap ops; else the plain compile of the graph, from then on

The rounds carry a difference from one group to the groups that its ranks are in as well (one round for each dim of a mesh), and a rank that
came too late finds the verdict of those that gave up waiting. So all ranks that are connected by groups of the graph take the same way.
Where ranks do not even hold the same collectives in a graph, or one publishes nothing (overlap is off there, or it runs uncompiled), their calls
cannot be counted alike: the group runs without overlap from then on (``apart``).

A plan that was agreed upon needs no second comparison, so a rank may compile again alone as long as it exchanges the same. On CPU groups, whose
collectives block the host anyway, digests are compared at every call: a rank that alone compiles to another exchange takes all ranks of that
call to the plain compile. On GPUs this would tie the hosts of all ranks to each other at every call; there the rank that compiled again ends
with an error at its deadline.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.errors import StrictError
from overlap_inductor.exchange import ExchangePlan
from overlap_inductor.exchange import difference
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")

DEFAULT_TIMEOUT = 300
KEPT_CALLS = 64
"""Calls whose digests stay in the store, where they are compared at every call. No rank can be so many calls behind another."""
_LONGEST_PAUSE = 0.25
"""Seconds between two looks at what the others have published; the first looks come much sooner."""
_PATIENCE = 15.0
"""Seconds after which a rank that still waits says for whom."""
ABSENT = 30.0
"""Seconds after which a rank that has not begun to compile anything with overlap on is taken for one that will not."""
_EQUAL, _DIFFERENT, _APART = "1", "0", "x"


@dataclass
class _GroupState:
    """What this rank knows of a live group.

    Attributes:
        calls: calls of graphs with a collective of the group.
        agreed / rejected: digests of plans that all ranks ran alike, and of those that differed (with the difference).
        told: digests whose plans this rank has published.
        newest: the plan agreed upon last; ``None`` while nothing of the group is overlapped.
        apart: why the group is not overlapped any more.
    """

    group: dist.ProcessGroup
    incarnation: int
    calls: int = 0
    agreed: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    newest: ExchangePlan | None = None
    apart: str = ""

    @property
    def prefix(self) -> str:
        return f"overlap_inductor/agree/{self.incarnation}"

    def key(self, call: int, rank: int) -> str:
        return f"{self.prefix}/{call}/{rank}"


_STATE: dict[str, _GroupState] = {}


def _state(group: dist.ProcessGroup) -> _GroupState:
    """State of a live group. A destroyed group whose name is used again gets a new one, and new keys in the store."""
    known = _STATE.get(group.group_name)
    if known is None or known.group is not group:
        known = _GroupState(group, 0 if known is None else known.incarnation + 1)
        _STATE[group.group_name] = known
    return known


@dataclass(frozen=True)
class Outcome:
    """``overlapped``: every rank runs the same exchange; ``fresh`` where all ranks have found so just now. Else ``difference`` says why not; it is empty where
    that is known already."""

    overlapped: bool
    difference: str = ""
    fresh: bool = False


_YES, _NO = Outcome(True), Outcome(False)


class Comparison:
    """Compares one compiled graph's plan with the other ranks', call by call.

    Args:
        groups: the groups whose collectives the graph holds, those of one rank left out.
        every_call: whether to compare at every call and not only at the first (CPU groups).
    """

    def __init__(self, plan: ExchangePlan, groups: Sequence[dist.ProcessGroup], every_call: bool) -> None:
        self.plan = plan
        self.groups = [g for g in groups if not moves_nothing(g)]
        self.every_call = every_call
        self.first = True
        self.withdrawn = False
        """Whether this rank runs the plain program whatever the others do: all of them do so for a reason of their own."""

        self.states: list[_GroupState] | None = None
        """Of the groups, once later calls need only be counted: the plan was agreed upon, or overlaps nothing."""

    def count(self) -> bool:
        """Count one call that has nothing to compare, which must cost the host little; false where ``call`` has to be asked."""
        if self.states is None or any(s.apart for s in self.states):
            return False
        for state in self.states:
            state.calls += 1
        return True

    def call(self) -> Outcome:
        """Count one call, and compare where that is needed.

        Raises:
            AgreementError: as ``_call`` says; or the groups' store is gone, and with it the rank that kept it.
        """
        try:
            return self._call()
        except dist.DistError as error:
            names = ", ".join(repr(g.group_name) for g in self.groups)
            raise AgreementError(f"rank {dist.get_rank()} cannot read the plans of group {names}: {error}. A rank probably died; see its own log first.") from error

    def _call(self) -> Outcome:
        """What ``call`` says.

        Raises:
            AgreementError: a rank has another version, died, or runs an earlier plan that was agreed upon.
            StrictError: in mode ``strict``, the plans differ.
        """
        if self.withdrawn:
            return _NO
        states = [_state(g) for g in self.groups]
        for state in states:
            state.calls += 1
        first, self.first = self.first, False
        digest, living = self.plan.digest, any(s.newest is not None for s in states)
        if not self.plan.overlaps:
            if first or (living and self.every_call):
                _publish(states, self.plan)
                if first and self.plan.mode == "strict":
                    _insist_on_nobody(states, self.plan)
            self.states = None if self.every_call else states
            return _NO
        if any(s.apart for s in states):
            return _NO
        if all(digest in s.agreed for s in states):
            if self.every_call and states:
                return _compared(states, self.plan, known=True)
            self.states = states
            return _YES
        if any(digest in s.rejected for s in states):
            if living and self.every_call:
                _publish(states, self.plan)
            return _NO
        return _compared(states, self.plan, known=False)

    def also(self, failure: str) -> Outcome:
        """Whether all ranks can go on after a call that compared equal. ``failure``: why this rank cannot, alike on all ranks of the group that it comes from; or ``""``.

        A group's failure reaches the ranks of the graph's other groups by rounds of their own.
        """
        states = [_state(g) for g in self.groups]
        verdict = _DIFFERENT if failure else _EQUAL
        if len(states) > 1:
            begun = time.monotonic()
            limit = max(_limit(s.group, self.plan, known=False) for s in states)
            peers = [dict.fromkeys(_peers(s.group), self.plan.digest) for s in states]
            for number in range(len(states)):
                verdict = _round(states, self.plan, peers, number, verdict, begun, limit, "/workspace")
        if verdict == _EQUAL:
            return _YES
        why = failure or "ranks of another group of this graph have no memory left for it"
        for state in states:
            state.agreed.discard(self.plan.digest)
            state.rejected[self.plan.digest] = why
        self.states = None
        if self.plan.mode == "strict":
            raise StrictError(f"OVERLAP_INDUCTOR=strict: the workspace of a graph cannot be made: {why}")
        text = f"all ranks run a graph without overlap, because its workspace cannot be made: {why}"
        first = all(s.group.rank() == 0 for s in states)
        log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
        return Outcome(False, text)


# (An op asks at every call.)
_parsed = functools.lru_cache(maxsize=4096)(ExchangePlan.from_json)


def require(group: dist.ProcessGroup, text: str) -> None:
    """Raise unless the plan ``text`` was agreed upon; compare it now where no ``Comparison`` has (a graph that runs outside of Inductor's own callable).

    Raises:
        AgreementError: the ranks' plans differ.
    """
    plan = _parsed(text)
    if moves_nothing(group) or plan.digest in _state(group).agreed:
        return
    outcome = Comparison(plan, [group], every_call=False).call()
    if not outcome.overlapped:
        state = _state(group)
        why = outcome.difference or state.rejected.get(plan.digest, "") or state.apart
        raise AgreementError(
            f"rank {dist.get_rank()} and other ranks of group {group.group_name!r} do not run the same overlap plan, so no data was moved: {why}. "
            "This graph does not run in Inductor's own callable, so its plain compile cannot take its place. Start every rank with the same "
            "OVERLAP_INDUCTOR* variables and the same model."
        )


def accept(group: dist.ProcessGroup, plan: ExchangePlan) -> None:
    """Take ``plan`` for agreed: it is part of one that was."""
    _state(group).agreed.add(plan.digest)


def plans_waiting(group: dist.ProcessGroup) -> str:
    """Peers that wait with a plan which this rank does not run, for the error of a transfer that found no partner; or ``""``.

    A rank that alone compiles again, to another exchange, stops at its comparison, while the others go on with the plan that all had agreed upon.
    """
    state = _state(group)
    if state.newest is None:
        return ""
    store, found = group_store(group), {}
    try:
        for peer in _peers(group):
            # (This rank has counted the call that found no partner, or, in a graph outside of Inductor's callable, has not.)
            for key in (state.key(state.calls, peer), state.key(state.calls + 1, peer)):
                if store.check([key]):
                    found[peer] = store.get(key).decode()
        plans = _plans(state, found, state.newest)
    except RuntimeError:
        # The store may have died with its rank.
        return ""
    why = difference(state.newest, {_global(group, r): p for r, p in plans.items()})
    return f"Meanwhile another plan was compiled by {why}. " if why else ""


def _publish(states: Sequence[_GroupState], plan: ExchangePlan) -> None:
    for state in states:
        store, rank = group_store(state.group), state.group.rank()
        if plan.digest not in state.told:
            state.told.add(plan.digest)
            store.set(f"{state.prefix}/plan/{plan.digest}", plan.to_json())
        store.set(state.key(state.calls, rank), plan.digest)
        if state.calls > KEPT_CALLS:
            store.delete_key(state.key(state.calls - KEPT_CALLS, rank))


def _compared(states: Sequence[_GroupState], plan: ExchangePlan, known: bool) -> Outcome:
    _publish(states, plan)
    begun = time.monotonic()
    # (A call of a known plan waits like any transfer; a first one may wait for compilers.)
    limits = [_limit(s.group, plan, known) for s in states]
    found = [_digests(s, plan, begun + limit) for s, limit in zip(states, limits, strict=True)]
    silent = [[r for r in _peers(s.group) if r not in digests] for s, digests in zip(states, found, strict=True)]
    texts = [_plans(s, digests, plan) for s, digests in zip(states, found, strict=True)]
    for state, plans, missing in zip(states, texts, silent, strict=True):
        _check_reachable(state, plan, plans, missing)
    differences = [_difference(s, plan, plans, missing) for s, plans, missing in zip(states, texts, silent, strict=True)]
    verdict = _DIFFERENT if any(differences) else _EQUAL
    if any(silent) or any(p.collectives != plan.collectives for plans in texts for p in plans.values()):
        verdict = _APART
    if not known or len(states) > 1:
        for number in range(1 if len(states) == 1 else 1 + len(states)):
            verdict = _round(states, plan, found, number, verdict, begun, max(limits))
    if verdict == _EQUAL:
        for state in states:
            state.agreed.add(plan.digest)
            state.newest = plan
        return Outcome(True, fresh=not known)
    return _rejected(states, plan, texts, differences, verdict)


def _check_reachable(state: _GroupState, plan: ExchangePlan, plans: Mapping[int, ExchangePlan], missing: Sequence[int]) -> None:
    """Raise where no way is left that all ranks could take."""
    group, mine = state.group, dist.get_rank()
    odd = {_global(group, r): p for r, p in plans.items() if p.version != plan.version}
    if odd:
        raise AgreementError(
            f"rank {mine} and other ranks of group {group.group_name!r} do not run the same version: {difference(plan, odd)}. No data was moved. "
            "Install the same version of overlap_inductor on every rank."
        )
    if missing and state.newest is not None:
        ranks = ", ".join(str(_global(group, r)) for r in missing)
        raise AgreementError(
            f"rank {mine} runs a graph of group {group.group_name!r} for which rank {ranks} published no plan. An earlier plan was agreed upon, and that rank may be "
            "in the middle of its transfers, so none can go on: this rank alone may have compiled again. Make its guards like the other ranks' "
            "(TORCH_LOGS=recompiles names them), or switch overlap off there (OVERLAP_INDUCTOR=off on all ranks)."
        )


def _difference(state: _GroupState, plan: ExchangePlan, plans: Mapping[int, ExchangePlan], missing: Sequence[int]) -> str:
    parts = [difference(plan, {_global(state.group, r): p for r, p in plans.items()})]
    if missing:
        ranks = ", ".join(str(_global(state.group, r)) for r in missing)
        parts.append(f"rank {ranks} published no plan (is overlap_inductor switched off there, does it run uncompiled, or did it die?)")
    return "; ".join(filter(None, parts))


def _round(
    states: Sequence[_GroupState], plan: ExchangePlan, found: Sequence[Mapping[int, str]], number: int, verdict: str, begun: float, limit: float, kind: str = ""
) -> str:
    """The worst verdict of this rank and of all that run the same plan in its groups: ``verdict``, ``number`` groups further. ``kind`` keeps rounds of one call apart."""
    for state in states:
        group_store(state.group).set(f"{state.key(state.calls, state.group.rank())}{kind}/{number}", verdict)
    said = [verdict]
    for state, digests in zip(states, found, strict=True):
        store, deadline = group_store(state.group), begun + (number + 2) * limit
        for rank in sorted(r for r, d in digests.items() if d == plan.digest):
            key = f"{state.key(state.calls, rank)}{kind}/{number}"
            if not _waited(store, key, deadline):
                raise AgreementError(
                    f"rank {_global(state.group, rank)} of group {state.group.group_name!r} published its plan and then nothing within {limit:.0f} s: it probably died. "
                    "See its own log first."
                )
            said.append(store.get(key).decode())
    return next(v for v in (_APART, _DIFFERENT, _EQUAL) if v in said)


def _rejected(
    states: Sequence[_GroupState], plan: ExchangePlan, texts: Sequence[Mapping[int, ExchangePlan]], differences: Sequence[str], verdict: str
) -> Outcome:
    why = "; ".join(filter(None, differences)) or "ranks of another group of this graph differ"
    for state, plans in zip(states, texts, strict=True):
        # (A plan that was agreed upon stays good: at the next call all ranks may have it again.)
        for digest in {plan.digest, *(p.digest for p in plans.values())} - state.agreed:
            state.rejected.setdefault(digest, why)
        if verdict == _APART:
            state.apart = why
    if plan.mode == "strict":
        raise StrictError(f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} and other ranks do not exchange the same: {why}. Make their models and switches alike.")
    first = all(not p.overlaps or r > s.group.rank() for s, plans in zip(states, texts, strict=True) for r, p in plans.items())
    text = f"rank {dist.get_rank()} and other ranks do not exchange the same, so all of them run this graph without overlap: {why}"
    log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
    return Outcome(False, text)


def _insist_on_nobody(states: Sequence[_GroupState], plan: ExchangePlan) -> None:
    """A graph without overlap, in mode ``strict``: raise where another rank overlaps its own."""
    for state in states:
        plans = _plans(state, _digests(state, plan, time.monotonic() + _limit(state.group, plan, known=False)), plan)
        others = {_global(state.group, r): p for r, p in plans.items() if p.overlaps}
        if others:
            raise StrictError(f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} overlaps nothing in a graph that others overlap: {difference(plan, others)}")


def _limit(group: dist.ProcessGroup, plan: ExchangePlan, known: bool) -> float:
    longest = group_timeout(group).total_seconds()
    return longest if known else min(float(plan.config.get("agreement_timeout", DEFAULT_TIMEOUT)), longest)


def _peers(group: dist.ProcessGroup) -> list[int]:
    return [r for r in range(group.size()) if r != group.rank()]


def _global(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def announce() -> None:
    """Tell the other ranks, once, that this one compiles with overlap on: they wait longer for its plans than for those of a rank that is silent."""
    if not dist.is_initialized() or moves_nothing(dist.group.WORLD):  # type: ignore[arg-type]
        return
    world = _state(dist.group.WORLD)  # type: ignore[arg-type]
    if _HERE not in world.told:
        world.told.add(_HERE)
        group_store(world.group).set(_here(dist.get_rank()), "1")


_HERE = "here"


def _here(rank: int) -> str:
    return f"{_state(dist.group.WORLD).prefix}/{_HERE}/{rank}"  # type: ignore[arg-type]


def _digests(state: _GroupState, mine: ExchangePlan, deadline: float) -> dict[int, str]:
    """The digests that the other ranks of the group published for this call, by rank of the group; of those that did before ``deadline``.

    A rank that has not announced itself ``ABSENT`` seconds after this one began to wait is not waited for any longer. Where it is only slow, it
    finds the verdict of the others and does as they do.
    """
    store, waiting = group_store(state.group), {r: state.key(state.calls, r) for r in _peers(state.group)}
    found: dict[int, str] = {}
    begun, said, pause = time.monotonic(), False, 1e-4
    while True:
        done = store.check(list(waiting.values()))
        for rank in [r for r, key in waiting.items() if done or store.check([key])]:
            found[rank] = store.get(waiting.pop(rank)).decode()
        now = time.monotonic()
        if not waiting or now > deadline or any(p.mode == "off" for p in _plans(state, found, mine).values()):
            return found
        if now - begun > ABSENT and not any(_is_here(_global(state.group, r)) for r in waiting):
            return found
        if not said and now - begun > _PATIENCE:
            said = True
            ranks = ", ".join(str(_global(state.group, r)) for r in waiting)
            log.warning("overlap_inductor: rank %d waits for rank %s to compile the same graph", dist.get_rank(), ranks)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _is_here(rank: int) -> bool:
    return group_store(dist.group.WORLD).check([_here(rank)])  # type: ignore[arg-type]


def _plans(state: _GroupState, digests: Mapping[int, str], mine: ExchangePlan) -> dict[int, ExchangePlan]:
    store = group_store(state.group)
    known = {mine.digest: mine}
    for digest in set(digests.values()) - {mine.digest}:
        known[digest] = ExchangePlan.from_json(store.get(f"{state.prefix}/plan/{digest}").decode())
    return {rank: known[digest] for rank, digest in digests.items()}


def _waited(store: dist.Store, key: str, deadline: float) -> bool:
    pause = 1e-4
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return True

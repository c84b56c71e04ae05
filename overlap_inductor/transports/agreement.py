"""Agreement: the ranks of a group compare what they exchange before an overlap op of a graph moves data.

A pass never communicates, because a cache hit on one rank would leave the others waiting. So the comparison is the
first act of a graph's call, before it reads or writes anything. Every rank publishes its plan's digest under the number
of the call (calls of graphs with a collective of that group are counted), and reads the others'::

    call n:   publish digest                     a rank that overlaps nothing goes on here
              equal = all digests of call n are mine
              for each round: publish equal; equal = all ranks with my digest say equal
              equal -> overlap ops; else the plain compile of the graph, from then on

Each round passes a rejection on to the other groups of a rank: one round for each dim of a mesh, and one in which a rank
that came too late finds the verdict of those that gave up waiting. So all ranks that groups of the graph connect take
the same way. A rank that runs the plain program without comparing publishes a refusal, for which nobody waits.

Where ranks do not even hold the same collectives in a graph, or have held other numbers of them before this call, or
one publishes nothing (overlap is off there, or it runs uncompiled), their calls cannot be counted alike: overlap is
disabled for the group from then on (``apart``). The rank that finds so says it in the store, where ranks that still
wait see it.

A plan that was agreed upon needs no second comparison by rounds in the store, so a rank may compile again alone as long
as it exchanges the same. Digests alone are compared at every call, so a rank that alone compiles to another exchange
takes all ranks of that call to the plain program. Ranks of one machine compare them in memory that all of them map
(``call_page``). This ties the hosts of a group to each other: none starts a call before all have reached it, which
costs nothing while the hosts run ahead of their GPUs. Ranks on several machines compare through the store: on CPU
groups at every call, whose collectives block the host anyway; on GPUs at first runs only, and there the rank that
compiled again ends with an error at its deadline.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence

import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.errors import StrictError
from overlap_inductor.exchange import ExchangePlan
from overlap_inductor.exchange import difference
from overlap_inductor.torch_compat.distributed import moves_nothing
from overlap_inductor.transports import call_board
from overlap_inductor.transports.call_board import EQUAL
from overlap_inductor.transports.call_board import GroupState
from overlap_inductor.transports.call_board import Outcome
from overlap_inductor.transports.call_board import global_rank
from overlap_inductor.transports.call_board import state_of
from overlap_inductor.transports.call_page import CALLS
from overlap_inductor.transports.call_page import Overwritten

log = logging.getLogger("overlap_inductor")

DEFAULT_TIMEOUT = 300
YES, NO = Outcome(True), Outcome(False)
DIFFERENT, APART = "0", "x"


class Comparison:
    """Compares one compiled graph's plan with the other ranks', call by call.

    Args:
        groups: the groups whose collectives the graph holds; those in which nothing moves are left out.
        every_call: whether to compare at every call where the ranks share no page (CPU groups), and not only at the
            first.
    """

    def __init__(self, plan: ExchangePlan, groups: Sequence[dist.ProcessGroup], every_call: bool) -> None:
        self.plan = plan
        self.groups = [g for g in groups if not moves_nothing(g)]
        self.every_call = every_call
        self.first = True
        self.withdrawn = False
        """Whether this rank runs the plain program whatever the others do: all do so for a reason of their own."""
        self.settled: list[tuple[GroupState, str, int]] | None = None
        """The groups, with what is alike in all that this rank publishes and the number of collectives, once there is
        little to ask: the plan was agreed upon, or overlaps nothing."""
        self.tied = False
        """Whether a settled plan is compared at every call; it has one group then."""
        self.counted = False
        """Whether ``count`` has counted and published a call that ``call`` goes on with."""

    def count(self) -> bool:
        """Count one call of a settled plan, at little host time; false where ``call`` has to be asked."""
        if self.settled is None or any(s.apart for s, _, _ in self.settled):
            return False
        for state, constant, collectives in self.settled:
            state.count(collectives)
            if state.page is not None:
                state.page.publish(state.calls, f"{constant}:{state.passed}")
        if not self.tied:
            return True
        state, constant, _ = self.settled[0]
        assert state.page is not None
        self.counted = not call_board.soon(state.page, state.calls, f"{constant}:{state.passed}")
        return not self.counted

    def call(self) -> Outcome:
        """Count one call, and compare where that is needed.

        Raises:
            AgreementError: a rank has another version, died, or runs an earlier plan that was agreed upon; or the
                groups' store is gone, and with it the rank that kept it.
            StrictError: in mode ``strict``, the plans differ.
        """
        try:
            return self._call()
        except dist.DistError as error:
            names = ", ".join(repr(g.group_name) for g in self.groups)
            raise AgreementError(
                f"rank {dist.get_rank()} cannot read the plans of group {names}: {error}. A rank probably died; see its "
                "own log first."
            ) from error

    def _call(self) -> Outcome:
        if self.withdrawn:
            return NO
        counted, self.counted = self.counted, False
        states = [state_of(g) for g in self.groups]
        for state in states if not counted else ():
            state.count(self.plan.count_in(state.group.group_name))
        first, self.first = self.first, False
        self.settled, self.tied = None, False
        if not self.plan.overlaps:
            return self._without_overlap(states, first)
        digest = self.plan.digest
        why = next((s.apart for s in states if s.apart), "") or next(
            (s.rejected[digest] for s in states if digest in s.rejected), ""
        )
        if why:
            call_board.publish(self._listening(states, first), self.plan, refused=True)
            if self.plan.mode == "strict":
                raise StrictError(
                    f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} and other ranks do not exchange the same: {why}"
                )
            return NO
        if not all(digest in s.agreed for s in states):
            outcome = _compared(states, self.plan, known=False)
            for state in states if outcome.overlapped and not self.every_call else ():
                state.unasked.update({digest} - state.tied)
            return outcome
        tied = bool(states) and all(digest in s.tied for s in states)
        outcome = YES
        if tied or (self.every_call and states):
            outcome = _compared(states, self.plan, known=True)
        else:
            call_board.publish([s for s in states if s.page is not None], self.plan)
        if outcome.overlapped and (not (tied or self.every_call) or (tied and len(states) == 1)):
            self._settle(states, tied)
        return outcome

    def _without_overlap(self, states: Sequence[GroupState], first: bool) -> Outcome:
        """Tell the others, who may overlap theirs; wait for them only where this rank alone may have left an agreed
        exchange."""
        # (A plan that this rank has run before is no sign that it has left an exchange.)
        new = any(self.plan.digest not in s.told for s in states)
        call_board.publish(self._listening(states, first), self.plan)
        strict = first and self.plan.mode == "strict"
        unpaged = [s for s in states if s.page is None and not self.every_call]
        asked: list[GroupState] = []
        if strict or (first and new and any(self.plan.collectives in s.overlapped for s in unpaged)):
            asked = list(states)
        elif first and new:
            asked = [s for s in states if s.page is not None and s.unasked]
        if not any(s.apart for s in states):
            _raise_if_others_overlap(asked, self.plan, strict)
        if not self.every_call or all(s.page is not None for s in states):
            self._settle(states, tied=False)
        return NO

    def _listening(self, states: Sequence[GroupState], first: bool) -> list[GroupState]:
        """The groups whose other ranks may wait to hear of this call."""
        return [s for s in states if first or self.every_call or s.page is not None]

    def _settle(self, states: Sequence[GroupState], tied: bool) -> None:
        self.settled = [
            (s, call_board.constant(s, self.plan), self.plan.count_in(s.group.group_name)) for s in states
        ]
        self.tied = tied

    def also(self, failure: str) -> Outcome:
        """Whether all ranks can go on after a call that compared equal.

        Args:
            failure: why this rank cannot, alike on all ranks of the group that it comes from; or ``""``. It reaches the
                ranks of the graph's other groups by rounds of their own.
        """
        states = [state_of(g) for g in self.groups]
        verdict = (DIFFERENT if failure else EQUAL, failure)
        if len(states) > 1:
            begun, limit = time.monotonic(), max(_limit(s.group, self.plan, known=False) for s in states)
            peers = [dict.fromkeys(call_board.peers(s.group), call_board.value(s, self.plan)) for s in states]
            for number in range(len(states)):
                verdict = _round(states, self.plan, peers, number, verdict, begun, limit, "workspace/")
        if verdict[0] == EQUAL:
            return YES
        why = verdict[1]
        for state in states:
            state.agreed.discard(self.plan.digest)
            state.unasked.discard(self.plan.digest)
            state.rejected[self.plan.digest] = why
        self.settled = None
        if self.plan.mode == "strict":
            raise StrictError(f"OVERLAP_INDUCTOR=strict: the workspace of a graph cannot be made: {why}")
        text = f"all ranks run a graph without overlap, because its workspace cannot be made: {why}"
        first = all(s.group.rank() == 0 for s in states)
        log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
        return Outcome(False, text)


# (An op asks at every call.)
_parsed = functools.lru_cache(maxsize=4096)(ExchangePlan.from_json)


def require(group: dist.ProcessGroup, text: str) -> None:
    """Raise unless the plan ``text`` was agreed upon; compare it now where no ``Comparison`` has (a graph that runs
    outside of Inductor's own callable).

    Raises:
        AgreementError: the ranks' plans differ.
    """
    plan, state = _parsed(text), state_of(group)
    if plan.digest in state.agreed or plan.digest in state.parts or moves_nothing(group):
        return
    outcome = Comparison(plan, [group], every_call=False).call()
    if not outcome.overlapped:
        why = outcome.difference or state.rejected.get(plan.digest, "") or state.apart
        raise AgreementError(
            f"rank {dist.get_rank()} and other ranks of group {group.group_name!r} do not run the same overlap plan, so no data was moved: {why}. "
            "This graph does not run in Inductor's own callable, so its plain program cannot take its place. Start every rank with the same "
            "OVERLAP_INDUCTOR* variables and the same model."
        )


def accept(group: dist.ProcessGroup, plan: ExchangePlan) -> None:
    """Let the ops of ``plan`` run, which is a part of one that was agreed upon."""
    state_of(group).parts.add(plan.digest)


def plans_waiting(group: dist.ProcessGroup) -> str:
    """Peers that wait with a plan which this rank does not run, for the error of a transfer that found no partner; or ``""``.

    A rank that alone compiles again, to another exchange, stops at its comparison, while the others go on with the plan
    that all had agreed upon.
    """
    state = state_of(group)
    if state.newest is None:
        return ""
    try:
        # (This rank has counted the call that found no partner, or, in a graph outside of Inductor's callable, has not.)
        plans = call_board.plans_now(state, state.newest, (state.calls, state.calls + 1))
    except RuntimeError:
        # The store may have died with its rank.
        return ""
    why = difference(state.newest, plans)
    return f"Meanwhile another plan was compiled by {why}. " if why else ""


def _compared(states: Sequence[GroupState], plan: ExchangePlan, known: bool) -> Outcome:
    call_board.publish(states, plan)
    begun = time.monotonic()
    # (A call of a known plan waits like any transfer; a first one may wait for compilers.)
    limits = [_limit(s.group, plan, known) for s in states]
    found, behind = list[dict[int, str]](), [""] * len(states)
    for number, (state, limit) in enumerate(zip(states, limits, strict=True)):
        try:
            found.append(call_board.values(state, plan, begun + limit))
        except Overwritten:
            found.append({})
            behind[number] = _left_behind(state)
    texts = [call_board.plans(s, values, plan) for s, values in zip(states, found, strict=True)]
    off = any(p.mode == "off" for plans in texts for p in plans.values())
    silent = [
        [] if off or s.apart or b else [r for r in call_board.peers(s.group) if r not in values]
        for s, values, b in zip(states, found, behind, strict=True)
    ]
    for state, values, plans, missing in zip(states, found, texts, silent, strict=True):
        _check_reachable(state, plan, values, plans, missing)
    why = "; ".join(filter(None, [*map(_difference, states, [plan] * len(states), texts, silent, found), *behind]))
    verdict = (DIFFERENT if why else EQUAL, why)
    if (
        off
        or any(silent)
        or any(s.apart or _astray(s, values) for s, values in zip(states, found, strict=True))
        or any(p.collectives != plan.collectives for plans in texts for p in plans.values())
    ):
        verdict = (APART, why)
    if not known or len(states) > 1:
        for number in range(1 if len(states) == 1 else 1 + len(states)):
            verdict = _round(states, plan, found, number, verdict, begun, max(limits))
    if verdict[0] != EQUAL:
        return _rejected(states, plan, texts, verdict)
    if not known:
        _share_pages(states, plan, found, begun, max(limits))
    for state in states:
        state.agreed.add(plan.digest)
        state.overlapped.add(plan.collectives)
        state.newest = plan
    return Outcome(True, fresh=not known)


def _share_pages(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    found: Sequence[Mapping[int, str]],
    begun: float,
    limit: float,
) -> None:
    """Have the agreed ``plan`` compared at every call where each of its groups, of all ranks that they connect, has a
    page. All these ranks come here together."""
    for state in sorted(states, key=lambda s: plan.alias(s.group.group_name)):
        state.share_page()
    verdict = (EQUAL if all(s.page is not None for s in states) else DIFFERENT, "")
    if len(states) > 1:
        for number in range(len(states)):
            verdict = _round(states, plan, found, number, verdict, begun, limit, "page/")
    if verdict[0] == EQUAL:
        for state in states:
            state.tied.add(plan.digest)


def _left_behind(state: GroupState) -> str:
    """Why the plans differ where a rank of the group has long left this call behind.

    Who does not wait for the others overlaps nothing, but for plans that are run without asking.
    """
    why = f"a rank is {CALLS} or more calls ahead of rank {dist.get_rank()}, without overlap"
    if state.unasked:
        raise AgreementError(
            f"in group {state.group.group_name!r} {why}, or with a plan that is compared at its first run only: which "
            "one cannot be known. Make the ranks' graphs alike (TORCH_LOGS=recompiles names the guards), or switch "
            "overlap off on all ranks (OVERLAP_INDUCTOR=off)."
        )
    return why


def _check_reachable(
    state: GroupState,
    plan: ExchangePlan,
    values: Mapping[int, str],
    plans: Mapping[int, ExchangePlan],
    missing: Sequence[int],
) -> None:
    """Raise where no way is left that all ranks could take."""
    group, mine = state.group, dist.get_rank()
    odd = {global_rank(group, r): p for r, p in plans.items() if p.version != plan.version}
    if odd:
        raise AgreementError(
            f"rank {mine} and other ranks of group {group.group_name!r} do not run the same version: {difference(plan, odd)}. No data was moved. "
            "Install the same version of overlap_inductor on every rank."
        )
    inside = {
        global_rank(group, r): p
        for r, p in plans.items()
        if p.digest in state.unasked - {plan.digest} and not values[r].endswith("!")
    }
    if inside:
        raise AgreementError(
            f"rank {mine} and other ranks of group {group.group_name!r} do not run the same: "
            f"{difference(plan, inside)}. The other ranks' plan was agreed upon, and is compared at its first run only, "
            "because ranks of one of its groups have no memory in common. So they are inside its transfers, and this "
            "rank cannot continue. It probably compiled again alone: make its guards like the other ranks' "
            "(TORCH_LOGS=recompiles names them), or switch overlap off on all ranks (OVERLAP_INDUCTOR=off)."
        )
    if missing and state.newest is not None:
        ranks = ", ".join(str(global_rank(group, r)) for r in missing)
        raise AgreementError(
            f"rank {mine} runs a graph of group {group.group_name!r} for which rank {ranks} published no plan. An earlier plan was agreed upon. "
            "That rank may be inside its transfers, so this rank cannot continue. This rank probably compiled again alone: make its guards like the "
            "other ranks' (TORCH_LOGS=recompiles names them), or switch overlap off on all ranks (OVERLAP_INDUCTOR=off)."
        )


def _difference(
    state: GroupState,
    plan: ExchangePlan,
    plans: Mapping[int, ExchangePlan],
    missing: Sequence[int],
    values: Mapping[int, str],
) -> str:
    parts = [state.apart, difference(plan, {global_rank(state.group, r): p for r, p in plans.items()})]
    if missing:
        ranks = ", ".join(str(global_rank(state.group, r)) for r in missing)
        parts.append(
            f"rank {ranks} published no plan (is overlap_inductor switched off there, does it run uncompiled, or did it die?)"
        )
    parts += [
        f"rank {global_rank(state.group, r)} has run graphs with {there} collectives of group "
        f"{state.group.group_name!r} before this call, and rank {dist.get_rank()} with {state.passed}: one of them has "
        "broken its graphs at other places"
        for r, there in _astray(state, values).items()
    ]
    mine = call_board.value(state, plan)
    refusing = [global_rank(state.group, r) for r, p in plans.items() if p.digest == plan.digest and values[r] != mine]
    if refusing and not any(parts):
        parts.append(
            f"rank {', '.join(map(str, refusing))} runs the plan without overlap, or uses its groups in another order"
        )
    return "; ".join(filter(None, parts))


def _astray(state: GroupState, values: Mapping[int, str]) -> dict[int, int]:
    """The ranks whose calls are not counted as this one's are, with how many collectives their calls before this one
    held."""
    numbers = {r: call_board.passed(v) for r, v in values.items()}
    return {r: n for r, n in numbers.items() if n != state.passed}


def _round(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    found: Sequence[Mapping[int, str]],
    number: int,
    verdict: tuple[str, str],
    begun: float,
    limit: float,
    kind: str = "",
) -> tuple[str, str]:
    """The worst verdict, with its reason, of this rank and of all that run the same plan in its groups: ``verdict``, one
    group further. ``kind`` keeps the rounds of one call apart."""
    for state in states:
        call_board.say(state, number, "".join(verdict), kind)
    said = [verdict]
    for state, values in zip(states, found, strict=True):
        mine = call_board.value(state, plan)
        for rank in sorted(r for r, v in values.items() if v == mine):
            try:
                text = call_board.said(state, rank, number, begun + (number + 2) * limit, kind)
            except Overwritten:
                text = None
            if text is None:
                raise AgreementError(
                    f"rank {global_rank(state.group, rank)} of group {state.group.group_name!r} published its plan and "
                    f"then no verdict within {limit:.0f} s, or went on without this rank: it, or this rank's host, "
                    "probably stood still. See its own log first."
                )
            said.append((text[0], text[1:]))
    return next(s for wanted in (APART, DIFFERENT, EQUAL) for s in said if s[0] == wanted)


def _rejected(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    texts: Sequence[Mapping[int, ExchangePlan]],
    verdict: tuple[str, str],
) -> Outcome:
    why = verdict[1]
    # (Who found it out has said so.)
    told = any(s.apart for s in states)
    for state, plans in zip(states, texts, strict=True):
        # (A plan that was agreed upon stays good: at the next call all ranks may have it again.)
        for digest in {plan.digest, *(p.digest for p in plans.values())} - state.agreed:
            state.rejected.setdefault(digest, why)
        if verdict[0] == APART:
            call_board.part(state, why)
    if plan.mode == "strict":
        raise StrictError(
            f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} and other ranks do not exchange the same: {why}. Make their models and switches alike."
        )
    text = f"rank {dist.get_rank()} and other ranks do not exchange the same, so all of them run this graph without overlap: {why}"
    pair = (plan.digest, *sorted({p.digest for plans in texts for p in plans.values()}))
    if any(pair in s.reported for s in states):
        return NO
    for state in states:
        state.reported.add(pair)
    first = not told and all(
        not p.overlaps or r > s.group.rank() for s, plans in zip(states, texts, strict=True) for r, p in plans.items()
    )
    log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
    return Outcome(False, text)


def _raise_if_others_overlap(states: Sequence[GroupState], plan: ExchangePlan, strict: bool) -> None:
    """A graph without overlap: raise where others overlap theirs and ``strict`` asks for it, or where they are inside an
    exchange that was agreed upon, in which this rank would be missed."""
    for state in states:
        try:
            values = call_board.values(state, plan, time.monotonic() + _limit(state.group, plan, known=False))
        except Overwritten:
            # (Who is so far ahead has not waited for this rank.)
            continue
        plans = call_board.plans(state, values, plan)
        others = {global_rank(state.group, r): p for r, p in plans.items() if p.overlaps}
        if strict and others:
            raise StrictError(
                f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} overlaps nothing in a graph that others overlap: {difference(plan, others)}"
            )
        if not strict:
            missing = [r for r in call_board.peers(state.group) if r not in values]
            _check_reachable(state, plan, values, plans, missing)


def _limit(group: dist.ProcessGroup, plan: ExchangePlan, known: bool) -> float:
    """Seconds to wait: of a known plan the group's timeout; else the switch's, and less than that, within which the peers' collectives still wait."""
    longest = call_board.timeout(group)
    return longest if known else min(float(plan.config.get("agreement_timeout", DEFAULT_TIMEOUT)), longest / 2)

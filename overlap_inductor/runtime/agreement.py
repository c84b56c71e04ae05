# SPDX-License-Identifier: Apache-2.0
"""Agreement: before a graph moves data, the ranks of a group compare their plans of the graph. A plan lists the
transfers that its rank is about to make.

A pass never communicates, because a rank with a cache hit does not run the pass. So a graph's call starts with the
comparison. Each rank counts its calls of graphs that hold a collective of the group. A *digest* is a hash of a
rank's plan::

    call n:   publish digest                     a rank that overlaps nothing skips the rest, and runs its graph
              equal = all digests of call n are mine
              for each round: publish equal; equal = all ranks with my digest say equal
              equal -> run the overlap ops
              else  -> run the plain program at this call. If all ranks made the call, but never agreed on the plan,
                       run the plain program at all later calls, too

What a rank publishes in a round is its *verdict*. A round passes a rejection on to the other groups of a rank. Two
ranks' first verdicts may differ: if a third rank is late, one of the two still reads the third rank's digest, and the
other has stopped waiting. After the last round, all ranks that the groups connect have one result. A plan with one
group needs at most one round. A plan with several groups needs one round more than it has groups. A rank whose plan was
rejected at an earlier call publishes a refusal, so no rank waits for its verdicts.

A rank that reaches Dynamo's recompile limit makes no call where the others make one. So ranks publish the place of each
call in the sequence of the group's collectives (``call_place``). While a rank is inside a collective that no graph
issued, it reports the place that it has reached (``call_report``). If a rank does not join a call, the others run their
plain programs in this call.

Overlap is disabled for the group permanently (``apart``) if calls of two ranks cannot be matched:

- their graphs hold different collectives;
- one call begins in the middle of the other's collectives;
- overlap is off on a rank;
- a rank publishes nothing and reports nothing.

At later calls of an agreed plan with one group, no round is needed if all ranks publish the same digest and place. How
digests are compared at later calls depends on the group:

- Ranks that share memory compare digests at every call, in memory that all of them map (``call_page``). This costs
  nothing while the hosts run ahead of their GPUs.
- Other ranks compare digests through the store: CPU groups at every call, GPU groups at a plan's first run only.

What happens if a rank recompiles alone, and its new graph makes other transfers? If digests are compared at every call,
all ranks run the plain program in that call. If digests are compared at a plan's first run only, the rank that
recompiled raises an error when its wait for the others' plans times out.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.errors import StrictError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.exchange import difference
from overlap_inductor.runtime import call_board
from overlap_inductor.runtime.call_board import EQUAL
from overlap_inductor.runtime.call_state import STATES
from overlap_inductor.runtime.call_state import GroupState
from overlap_inductor.runtime.call_state import state_of
from overlap_inductor.runtime.verdict import DIFFERENT
from overlap_inductor.runtime.verdict import NO
from overlap_inductor.runtime.verdict import YES
from overlap_inductor.runtime.verdict import Outcome
from overlap_inductor.runtime.verdict import compared
from overlap_inductor.runtime.verdict import one_round
from overlap_inductor.runtime.verdict import raise_if_others_overlap
from overlap_inductor.runtime.verdict import seconds_to_wait
from overlap_inductor.torch_compat.distributed import moves_nothing

log = logging.getLogger("overlap_inductor")


class Comparison:
    """Compares one compiled graph's plan with the other ranks' plans, call by call.

    Args:
        plan: the transfers that this rank makes in the graph.
        groups: the groups whose collectives the graph holds. Groups in which no data moves are ignored.
        every_call: True if ranks that share no memory compare at every call (CPU groups), not at the first call only.
    """

    def __init__(self, plan: ExchangePlan, groups: Sequence[dist.ProcessGroup], every_call: bool) -> None:
        self.plan = plan
        self.groups = [g for g in groups if not moves_nothing(g)]
        self.every_call = every_call
        self.first = True
        self.withdrawn = False
        """True if this rank runs the plain program without comparing. All ranks of the groups set it together."""
        self.settled: list[tuple[GroupState, str, int]] | None = None
        """For each group: its state, the constant part of what this rank publishes at each call, and the number of the
        plan's collectives in the group. ``None`` if ``call`` must decide about the next call."""
        self.tied = False
        """True if a settled plan is compared at every call. Such a plan has one group."""
        self._states: list[GroupState] = []
        """The states of ``groups``, from the first call on."""
        self.counted = False
        """True if ``count`` has counted a call, and ``call`` must still compare or publish it."""

    def count(self) -> bool:
        """Count one call of a settled plan, with little host time. Returns False if ``call`` must first decide whether
        the graph may run. Raises ``AgreementError`` if the store has failed, for example because a rank died."""
        if self.settled is None or any(s.apart for s, _, _ in self.settled):
            return False
        for state, _, collectives in self.settled:
            state.count(collectives)
        if self.every_call and any(s.between and s.page is None for s, _, _ in self.settled):
            # This rank may have to skip calls (``call_board.catch_up``).
            self.counted = True
            return False
        try:
            for state, constant, _ in self.settled:
                if self.every_call or state.page is not None:
                    state.publish(f"{constant}:{state.passed}:{state.place}", watched=False)
        except dist.DistError as error:
            raise self._lost(error) from error
        if not self.tied:
            return True
        state, constant, _ = self.settled[0]
        assert state.page is not None
        self.counted = not call_board.soon(state.page, state.calls, f"{constant}:{state.passed}:{state.place}")
        return not self.counted

    def returned(self) -> None:
        """Note that the call has issued its collectives. Collectives up to the next call of a graph are outside of
        calls."""
        for state in self._states:
            state.returned()

    def call(self) -> Outcome:
        """Count one call, unless ``count`` has counted it or the plan is ``withdrawn``. If needed, compare its plan
        with the other ranks' plans.

        Raises:
            AgreementError: the ranks can neither all overlap nor all run the plain program. Or a rank died or gave no
                verdict in time.
            StrictError: in mode ``strict``, the plans differ, or overlap is disabled for a group of the plan.
        """
        try:
            return self._call()
        except dist.DistError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> AgreementError:
        names = ", ".join(repr(g.group_name) for g in self.groups)
        return AgreementError(
            f"rank {dist.get_rank()} cannot read the plans of group {names}: {error}. A rank probably died; see its"
            " own log first."
        )

    def _call(self) -> Outcome:
        if self.withdrawn:
            return NO
        counted, self.counted = self.counted, False
        states = self._states = [state_of(g) for g in self.groups]
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
            listening = self._listening(states, first)
            call_board.catch_up(listening, self.plan)
            call_board.publish(listening, self.plan, refused=True)
            if self.plan.mode == "strict":
                raise StrictError(
                    f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} and other ranks do not make the same transfers:"
                    f" {why}"
                )
            return NO
        if not all(digest in s.agreed for s in states):
            outcome = compared(states, self.plan, known=False)
            for state in states if outcome.overlapped and not self.every_call else ():
                state.unasked.update({digest} - state.tied)
            return outcome
        tied = bool(states) and all(digest in s.tied for s in states)
        outcome = YES
        if tied or (self.every_call and states):
            outcome = compared(states, self.plan, known=True)
        else:
            call_board.publish([s for s in states if s.page is not None], self.plan)
        if outcome.overlapped and (not (tied or self.every_call) or (tied and len(states) == 1)):
            self._settle(states, tied)
        return outcome

    def _without_overlap(self, states: Sequence[GroupState], first: bool) -> Outcome:
        """Publish a plan without overlap. At the first call, wait for the other ranks' plans in mode ``strict``, or if
        other ranks may be inside the transfers of an agreed plan."""
        # Only a plan that this rank has not published before can be a recompile that took the place of an agreed plan.
        # Only then may other ranks still run the agreed plan.
        new = any(self.plan.digest not in s.told for s in states)
        listening = self._listening(states, first)
        call_board.catch_up(listening, self.plan)
        call_board.publish(listening, self.plan)
        strict = first and self.plan.mode == "strict"
        unpaged = [s for s in states if s.page is None and not self.every_call]
        asked: list[GroupState] = []
        if strict or (first and new and any(self.plan.collectives in s.overlapped for s in unpaged)):
            asked = list(states)
        elif first and new:
            asked = [s for s in states if s.page is not None and s.unasked]
        if not any(s.apart for s in states):
            raise_if_others_overlap(asked, self.plan, strict)
        self._settle(states, tied=False)
        return NO

    def _listening(self, states: Sequence[GroupState], first: bool) -> list[GroupState]:
        """The groups whose other ranks may wait for what this rank publishes at this call."""
        return [s for s in states if first or self.every_call or s.page is not None]

    def _settle(self, states: Sequence[GroupState], tied: bool) -> None:
        self.settled = [(s, call_board.constant(s, self.plan), self.plan.count_in(s.group.group_name)) for s in states]
        self.tied = tied

    def also(self, failure: str) -> Outcome:
        """Check that all ranks can go on, after ``call`` has found their plans equal. If one rank cannot, all ranks
        reject the plan.

        Args:
            failure: why this rank cannot go on, or ``""``; equal on all ranks of the group in which the failure
                occurred. Rounds pass it on to the graph's other groups.

        Raises:
            StrictError: a rank cannot go on, in mode ``strict``.
            AgreementError: a rank gave no verdict in time.
        """
        states = [state_of(g) for g in self.groups]
        verdict = (DIFFERENT if failure else EQUAL, failure)
        if len(states) > 1:
            begun, limit = time.monotonic(), max(seconds_to_wait(s.group, self.plan, known=False) for s in states)
            peers = [dict.fromkeys(call_board.peers(s.group), call_board.value(s, self.plan).text) for s in states]
            for number in range(len(states)):
                verdict = one_round(states, self.plan, peers, number, verdict, begun, limit, "workspace/")
        if verdict[0] == EQUAL:
            return YES
        why = verdict[1]
        for state in states:
            state.agreed.discard(self.plan.digest)
            state.unasked.discard(self.plan.digest)
            state.rejected[self.plan.digest] = why
        self.settled = None
        if self.plan.mode == "strict":
            raise StrictError(f"OVERLAP_INDUCTOR=strict: a graph cannot run with overlap: {why}")
        text = f"all ranks run a graph without overlap: {why}"
        first = all(s.group.rank() == 0 for s in states)
        log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
        return Outcome(False, text)


# Op ``agree`` parses its plan at every call.
_parsed = functools.lru_cache(maxsize=4096)(ExchangePlan.from_json)


def require(group: dist.ProcessGroup, text: str) -> None:
    """Raise unless the ranks agree upon the plan. If they have not agreed upon it yet, compare the plan here. The
    comparison is needed here only if the graph does not run in Inductor's own callable.

    Args:
        text: an ``ExchangePlan`` as JSON.

    Raises:
        AgreementError: the ranks' plans differ, or cannot be compared (see ``Comparison.call``).
        StrictError: the ranks' plans differ, in mode ``strict``.
    """
    plan, state = _parsed(text), state_of(group)
    if plan.digest in state.agreed or plan.digest in state.parts or moves_nothing(group):
        return
    outcome = Comparison(plan, [group], every_call=False).call()
    if not outcome.overlapped:
        why = outcome.difference or state.rejected.get(plan.digest, "") or state.apart
        raise AgreementError(
            f"rank {dist.get_rank()} and other ranks of group {group.group_name!r} do not run the same overlap plan, so"
            f" no data was moved: {why}. This graph does not run in Inductor's own callable, so its plain program"
            " cannot take its place. Start every rank with the same OVERLAP_INDUCTOR* variables and the same model."
        )


def accept(group: dist.ProcessGroup, plan: ExchangePlan) -> None:
    """Let the ops of ``plan`` run. ``plan`` is the part of an agreed plan that belongs to a subgraph."""
    state_of(group).parts.add(plan.digest)


def plans_waiting(group: dist.ProcessGroup) -> str:
    """A sentence that names the peers that run another plan, or ``""``. It is part of the error of a transfer whose
    partner did not come, because the partner may have recompiled alone."""
    state = STATES.known(group)
    if state is None or state.newest is None:
        return ""
    try:
        # If Inductor's own callable ran the graph, the failed call was counted, so it is the newest call. Otherwise the
        # failed call is the one after the newest call. ``plans_now`` reads the plans of both calls.
        plans = call_board.plans_now(state, state.newest)
    except RuntimeError:
        # The rank that kept the store may have died.
        return ""
    why = difference(state.newest, plans)
    return f"Meanwhile another plan was compiled by {why}. " if why else ""

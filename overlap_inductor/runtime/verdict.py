# SPDX-License-Identifier: Apache-2.0
"""Compares one call of a plan among the ranks, and finds, logs or raises the reasons of a rejection. A rank passes a
rejection in one group on to its other groups in *rounds*. In a round, each rank publishes a verdict and reads the
verdicts of the other ranks (``one_round``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from overlap_inductor.errors import AgreementError
from overlap_inductor.errors import StrictError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.exchange import difference
from overlap_inductor.runtime import call_board
from overlap_inductor.runtime.call_board import EQUAL
from overlap_inductor.runtime.call_board import ONCE
from overlap_inductor.runtime.call_board import global_rank
from overlap_inductor.runtime.call_page import CALLS
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.runtime.call_place import MOVED
from overlap_inductor.runtime.call_place import REFUSED
from overlap_inductor.runtime.call_place import CallPlace
from overlap_inductor.runtime.call_place import Order
from overlap_inductor.runtime.call_state import GroupState

log = logging.getLogger("overlap_inductor")

DEFAULT_TIMEOUT = 300


@dataclass(frozen=True)
class Outcome:
    """The result of comparing one call.

    Attributes:
        overlapped: True if every rank runs the plan with overlap.
        difference: why not every rank overlaps the plan. Empty if there is nothing new to report.
        fresh: True if all ranks agreed upon this plan in this call and not in an earlier one.
    """

    overlapped: bool
    difference: str = ""
    fresh: bool = False


YES, NO = Outcome(True), Outcome(False)
DIFFERENT, APART = "0", "x"
"""Two verdicts about a plan. ``DIFFERENT``: all ranks run the plain program. ``APART``: the ranks also disable overlap
for the plan's groups. There are two more verdicts, in ``call_board``. ``EQUAL``: nothing is against overlap. ``ONCE``:
all ranks run the plain program, in this call alone."""


def compared(states: Sequence[GroupState], plan: ExchangePlan, known: bool) -> Outcome:
    """Publish this call of ``plan``, read what the other ranks published, and reach one verdict with them.

    Args:
        states: the states of the plan's groups in which something moves. They must have counted this call.
        known: True if the plan was agreed upon before.

    Raises:
        AgreementError: the ranks can neither all overlap nor all run the plain program, or a rank gave no verdict in
            time.
        StrictError: in mode ``strict``, the ranks do not all overlap the plan.
    """
    call_board.publish(states, plan)
    begun = time.monotonic()
    limits = [seconds_to_wait(s.group, plan, known) for s in states]
    found, behind = list[dict[int, str]](), [""] * len(states)
    for number, (state, limit) in enumerate(zip(states, limits, strict=True)):
        try:
            found.append(call_board.values(state, plan, begun + limit))
        except Overwritten:
            found.append({})
            behind[number] = _left_behind(state)
    if known and len(states) == 1 and not behind[0] and _all_equal(states[0], plan, found[0]):
        # All values are equal, so no verdict is needed. A rank that still waits for a late rank's value needs none
        # either: it will also find equal values.
        states[0].newest = plan
        return YES
    here = [_of_this_call(s, plan, values) for s, values in zip(states, found, strict=True)]
    texts = [call_board.plans(s, values, plan) for s, values in zip(states, here, strict=True)]
    off = any(p.mode == "off" for plans in texts for p in plans.values())
    silent = [
        [] if off or s.apart or b else [r for r in call_board.peers(s.group) if r not in values]
        for s, values, b in zip(states, found, behind, strict=True)
    ]
    for state, values, plans, missing in zip(states, found, texts, silent, strict=True):
        _check_reachable(state, plan, values, plans, missing)
    why = "; ".join(filter(None, [*map(_difference, states, [plan] * len(states), texts, silent, here), *behind]))
    verdict = (DIFFERENT if why else EQUAL, why)
    absent = [global_rank(s.group, r) for s, a, b in zip(states, found, here, strict=True) for r in a if r not in b]
    if absent and not why:
        ranks = ", ".join(map(str, sorted(set(absent))))
        verdict = (
            ONCE,
            f"where rank {dist.get_rank()} calls this graph, rank {ranks} issued collectives outside of graphs."
            f" Rank {ranks} probably ran the graph uncompiled, because Dynamo's recompile limit was reached there."
            " (TORCH_LOGS=recompiles names the guards that differ.)",
        )
    if (
        off
        or any(silent)
        # A graph that divides tokens issues other collectives than the uncompiled model. So the absent rank
        # counts other numbers of collectives from now on, and its calls cannot be matched with this rank's.
        or (absent and any(c.endswith(" tokens") for c in plan.collectives))
        or any(s.apart or _astray(s, plan, values) for s, values in zip(states, here, strict=True))
        or any(p.collectives != plan.collectives for plans in texts for p in plans.values())
    ):
        verdict = (APART, verdict[1])
    places = [_places(s, plan, values) for s, values in zip(states, here, strict=True)]
    # Without verdicts, two ranks could decide differently about a late rank. For example, one rank stops waiting, and
    # the other rank sees the late rank join.
    uneven = bool(absent) or any(
        p != call_board.value(s, plan) for s, others in zip(states, places, strict=True) for p in others
    )
    if not known or len(states) > 1 or uneven:
        for number in range(1 if len(states) == 1 else 1 + len(states)):
            verdict = one_round(states, plan, found, number, verdict, begun, max(limits))
    if verdict[0] != EQUAL:
        return _rejected(states, plan, texts, verdict)
    if not known:
        _share_pages(states, plan, found, begun, max(limits))
    for state, others in zip(states, places, strict=True):
        state.level(others)
        state.agreed.add(plan.digest)
        state.overlapped.add(plan.collectives)
        state.newest = plan
    return Outcome(True, fresh=not known)


def _all_equal(state: GroupState, plan: ExchangePlan, values: Mapping[int, str]) -> bool:
    """Whether every other rank has published for this call what this rank has published. False if overlap is disabled
    for the group."""
    mine = call_board.value(state, plan).text
    return not state.apart and len(values) == state.group.size() - 1 and all(v == mine for v in values.values())


def _of_this_call(state: GroupState, plan: ExchangePlan, values: Mapping[int, str]) -> dict[int, str]:
    """``values`` without those of ranks that ran this call uncompiled."""
    return {r: v for r, v in values.items() if call_board.order_of(state, plan, v) is not Order.LATER}


def _places(state: GroupState, plan: ExchangePlan, values: Mapping[int, str]) -> list[CallPlace]:
    """The values of the other ranks that run ``plan`` in the same call."""
    return [CallPlace.parsed(v) for v in values.values() if call_board.is_partner(state, plan, v)]


def _share_pages(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    found: Sequence[Mapping[int, str]],
    begun: float,
    limit: float,
) -> None:
    """Make the page of each group of the agreed plan: shared memory in which the group's ranks compare later calls. All
    ranks that the groups connect call this together. If each group has a page on all these ranks, *tie* the plan: the
    ranks compare a tied plan at every call."""
    for state in sorted(states, key=lambda s: plan.alias(s.group.group_name)):
        state.share_page()
    verdict = (EQUAL if all(s.page is not None for s in states) else DIFFERENT, "")
    if len(states) > 1:
        for number in range(len(states)):
            verdict = one_round(states, plan, found, number, verdict, begun, limit, "page/")
    if verdict[0] == EQUAL:
        for state in states:
            state.tied.add(plan.digest)


def _left_behind(state: GroupState) -> str:
    """The text of the difference, for a group in which a rank is ``CALLS`` or more calls ahead. Such a rank overlaps
    nothing, or runs plans that are not compared again (``GroupState.unasked``).

    Raises:
        AgreementError: the group has plans that are not compared again.
    """
    why = f"a rank is {CALLS} or more calls ahead of rank {dist.get_rank()}, without overlap"
    if state.unasked:
        raise AgreementError(
            f"in group {state.group.group_name!r} {why}, or with a plan that is compared at its first run only. This"
            " rank cannot tell which, so it cannot continue. Make the ranks' graphs alike (TORCH_LOGS=recompiles"
            " names the guards), or switch overlap off on all ranks (OVERLAP_INDUCTOR=off)."
        )
    return why


def _check_reachable(
    state: GroupState,
    plan: ExchangePlan,
    values: Mapping[int, str],
    plans: Mapping[int, ExchangePlan],
    missing: Sequence[int],
) -> None:
    """Raise ``AgreementError`` if the ranks can neither all overlap nor all run the plain program. Either their
    versions differ, or a rank may be inside the transfers of an agreed plan."""
    group, mine = state.group, dist.get_rank()
    odd = {global_rank(group, r): p for r, p in plans.items() if p.version != plan.version}
    if odd:
        raise AgreementError(
            f"rank {mine} and other ranks of group {group.group_name!r} do not run the same version of"
            f" overlap_inductor: {difference(plan, odd)}. No data was moved. Install the same version on every rank."
        )
    inside = {
        global_rank(group, r): p
        for r, p in plans.items()
        if p.digest in state.unasked - {plan.digest} and not values[r].endswith(REFUSED)
    }
    if inside:
        raise AgreementError(
            f"rank {mine} and other ranks of group {group.group_name!r} do not run the same plan:"
            f" {difference(plan, inside)}. The other ranks' plan was agreed upon and is compared at its first run"
            " only, because ranks of one of its groups share no memory. So the other ranks are inside the plan's"
            " transfers, and this rank cannot continue. This rank probably recompiled alone: make its guards equal to"
            " the other ranks' (TORCH_LOGS=recompiles names them), or switch overlap off on all ranks"
            " (OVERLAP_INDUCTOR=off)."
        )
    # ``MOVED``: this rank ran the other ranks' last call uncompiled, and told them so. Then they ran that call without
    # overlap. So the missing ranks are not inside the transfers of an agreed plan.
    if missing and state.newest is not None and state.mark != MOVED:
        ranks = ", ".join(str(global_rank(group, r)) for r in missing)
        raise AgreementError(
            f"rank {mine} runs a graph of group {group.group_name!r} for which rank {ranks} published no plan. An"
            f" earlier plan was agreed upon. Rank {ranks} may be inside that plan's transfers, so this rank cannot"
            " continue. This rank probably recompiled alone: make its guards equal to the other ranks'"
            " (TORCH_LOGS=recompiles names them), or switch overlap off on all ranks (OVERLAP_INDUCTOR=off)."
        )


def _difference(
    state: GroupState,
    plan: ExchangePlan,
    plans: Mapping[int, ExchangePlan],
    missing: Sequence[int],
    values: Mapping[int, str],
) -> str:
    """How this rank and the group's other ranks differ, as a text. ``""`` if they do not differ."""
    parts = [state.apart, difference(plan, {global_rank(state.group, r): p for r, p in plans.items()})]
    if missing:
        ranks = ", ".join(str(global_rank(state.group, r)) for r in missing)
        parts.append(
            f"rank {ranks} published no plan (is overlap_inductor switched off there, did the rank run the graph"
            " uncompiled, or did the rank die?)"
        )
    parts += [
        f"rank {global_rank(state.group, r)} has issued {there} collectives of group "
        f"{state.group.group_name!r} before this call, but rank {dist.get_rank()} has issued {state.place}: their "
        "graphs are broken at different places"
        for r, there in _astray(state, plan, values).items()
    ]
    refusing = [
        global_rank(state.group, r)
        for r, p in plans.items()
        if p.digest == plan.digest and not call_board.is_partner(state, plan, values[r])
    ]
    if refusing and not any(parts):
        parts.append(
            f"rank {', '.join(map(str, refusing))} runs the plan without overlap, or uses its groups in another order"
        )
    return "; ".join(filter(None, parts))


def _astray(state: GroupState, plan: ExchangePlan, values: Mapping[int, str]) -> dict[int, int]:
    """``{rank: number of the group's collectives that it issued before its call}``, for the ranks whose call cannot be
    matched with this rank's call."""
    return {
        r: CallPlace.parsed(v).place
        for r, v in values.items()
        if call_board.order_of(state, plan, v) in (Order.UNKNOWN, Order.EARLIER)
    }


def one_round(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    found: Sequence[Mapping[int, str]],
    number: int,
    verdict: tuple[str, str],
    begun: float,
    limit: float,
    kind: str = "",
) -> tuple[str, str]:
    """Publish ``verdict``, and read the verdicts of those ranks of this rank's groups that run the same plan in the
    same call. Return the worst of all these verdicts, with its reason.

    Args:
        found: for each group, the values that its ranks published for this call.
        number: number of the round, from 0.
        verdict: ``(EQUAL, ONCE, DIFFERENT or APART; reason)``.
        begun: when this call's comparison began, in seconds of ``time.monotonic()``.
        limit: seconds. Round ``number`` waits until ``begun + (number + 2) * limit``.
        kind: distinguishes several series of rounds of one call.

    Raises:
        AgreementError: a rank published its value but no verdict in time, or went on without this rank.
    """
    for state in states:
        call_board.say(state, number, "".join(verdict), kind)
    said = [verdict]
    for state, values in zip(states, found, strict=True):
        for rank in sorted(r for r, v in values.items() if call_board.is_partner(state, plan, v)):
            try:
                text = call_board.said(state, rank, number, begun + (number + 2) * limit, kind)
            except Overwritten:
                text = None
            if text is None:
                raise AgreementError(
                    f"rank {global_rank(state.group, rank)} of group {state.group.group_name!r} published its plan."
                    f" But that rank gave no verdict within {(number + 2) * limit:.0f} s, or it went on without this"
                    " rank. That rank or this rank's host probably stalled. See that rank's log first."
                )
            said.append((text[0], text[1:]))
    return next(s for wanted in (APART, DIFFERENT, ONCE, EQUAL) for s in said if s[0] == wanted)


def _rejected(
    states: Sequence[GroupState],
    plan: ExchangePlan,
    texts: Sequence[Mapping[int, ExchangePlan]],
    verdict: tuple[str, str],
) -> Outcome:
    """Store and log once that the ranks differ, and return the outcome. Raises ``StrictError`` in mode ``strict``."""
    why = verdict[1]
    # If overlap was already disabled for a group, a rank has already logged why.
    told = any(s.apart for s in states)
    for state, plans in zip(states, texts, strict=True):
        # A rejected plan is not compared again. Plans that were agreed upon before are not rejected. The
        # verdict ``ONCE`` rejects no plan.
        seen = {plan.digest, *(p.digest for p in plans.values())} if verdict[0] != ONCE else set()
        for digest in seen - state.agreed:
            state.rejected.setdefault(digest, why)
        if verdict[0] == APART:
            call_board.part(state, why)
    if plan.mode == "strict":
        raise StrictError(
            f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} and other ranks do not make the same transfers:"
            f" {why}. Make their models and switches alike."
        )
    text = (
        f"rank {dist.get_rank()} and other ranks do not make the same transfers, so all of them run this graph without"
        f" overlap: {why}"
    )
    once = ("uncompiled",) if verdict[0] == ONCE else ()
    pair = once or (plan.digest, *sorted({p.digest for plans in texts for p in plans.values()}))
    if any(pair in s.reported for s in states):
        return NO
    for state in states:
        state.reported.add(pair)
    first = not told and all(
        not p.overlaps or r > s.group.rank() for s, plans in zip(states, texts, strict=True) for r, p in plans.items()
    )
    log.log(logging.WARNING if first else logging.INFO, "overlap_inductor: %s", text)
    return Outcome(False, text)


def raise_if_others_overlap(states: Sequence[GroupState], plan: ExchangePlan, strict: bool) -> None:
    """For a call of a graph without overlap, read the other ranks' plans, and raise if this rank must not go on.

    Raises:
        StrictError: another rank overlaps its graph, and ``strict`` is True.
        AgreementError: ``strict`` is False, and a rank has another version, or may be inside an agreed plan's
            transfers.
    """
    for state in states:
        try:
            values = call_board.values(state, plan, time.monotonic() + seconds_to_wait(state.group, plan, known=False))
        except Overwritten:
            # If the other rank's host waited in transfers with this rank, it could not be so many calls ahead. Kernels
            # on a GPU may still wait there. They time out, and their rank raises.
            continue
        plans = call_board.plans(state, values, plan)
        others = {global_rank(state.group, r): p for r, p in plans.items() if p.overlaps}
        if strict and others:
            raise StrictError(
                f"OVERLAP_INDUCTOR=strict: rank {dist.get_rank()} overlaps nothing in a graph that other ranks overlap:"
                f" {difference(plan, others)}"
            )
        if not strict:
            missing = [r for r in call_board.peers(state.group) if r not in values]
            _check_reachable(state, plan, values, plans, missing)


def seconds_to_wait(group: dist.ProcessGroup, plan: ExchangePlan, known: bool) -> float:
    """Seconds to wait for the other ranks. For a known plan: the group's timeout. For a new plan:
    ``agreement_timeout``, but at most half of the group's timeout, so that peers' collectives do not time out first."""
    longest = call_board.timeout(group)
    return longest if known else min(float(plan.config.get("agreement_timeout", DEFAULT_TIMEOUT)), longest / 2)

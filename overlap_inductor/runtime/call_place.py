# SPDX-License-Identifier: Apache-2.0
"""``CallPlace``: the place of a rank's call of a compiled graph in the sequence of a group's collectives. Two places
tell whether the calls of two ranks are the same call.

The n-th call of one rank need not be the n-th call of another. One rank may run a frame uncompiled, or its graph may be
broken into two. The rank still issues the same collectives. So a call's *place* is the number of the group's
collectives that the rank has issued before the call. It counts the collectives of the graphs that the rank called, and
those that the backend counted between calls::

    rank 0   A: place 0   (uncompiled: one collective)   C: place 2
    rank 1   A: place 0    B: place 1                    C: place 2

Each rank publishes its n-th call under the number n (``call_board``). Rank 0 published C as its second call, and finds
that rank 1 published B as its second call. B ends at place 2, where C begins, so rank 0 has run B uncompiled. Rank 0
writes that it skipped this number, and goes on to the next one. Rank 1, which waits in B, reads this and runs its plain
program.

The backend's count is exact if it counts collectives only, as NCCL does. Gloo also counts sends and receives, so two
ranks may count differently. With such a backend, calls at different places are still the same call if their plans,
their numbers and their attributes ``passed`` (see ``CallPlace``) are equal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SKIPPED, REFUSED, MOVED = "-", "!", "~"
"""Marks of the value that a rank publishes for a call:

* ``SKIPPED``: the rank ran this call uncompiled;
* ``REFUSED``: the rank runs this call's graph without overlap, and does not wait for the other ranks;
* ``MOVED``: the rank has skipped a number to reach this call, so the ranks must exchange verdicts
  on whether to overlap it (``runtime.verdict``).
"""


class Order(enum.Enum):
    """How another rank's call stands to this rank's call of the same number."""

    SAME = "same"
    EARLIER = "earlier"
    """The other call ended before this rank's call began, so this rank ran the other call uncompiled."""
    LATER = "later"
    """The other call began after this rank's call ended, so the other rank ran this rank's call uncompiled."""
    UNKNOWN = "unknown"
    """Only some of the collectives of the two calls are the same."""


@dataclass(frozen=True)
class CallPlace:
    """The value that a rank publishes for a call.

    Attributes:
        constant: what the values of all calls of a plan share. Its last field is the number of the plan's collectives
            in the group.
        passed: number of the group's collectives in the graphs of this rank's earlier calls.
        place: number of the group's collectives that this rank issued before the call.
        mark: ``SKIPPED``, ``REFUSED``, ``MOVED`` or ``""``.
    """

    constant: str
    passed: int
    place: int
    mark: str = ""

    @property
    def end(self) -> int:
        """The place after the call's last collective."""
        return self.place + int(self.constant.rsplit(":", 1)[1])

    @property
    def text(self) -> str:
        return f"{self.constant}:{self.passed}:{self.place}{self.mark}"

    @classmethod
    def parsed(cls, text: str) -> CallPlace:
        mark = text[-1] if text[-1] in (SKIPPED, REFUSED, MOVED) else ""
        constant, passed, place = text.removesuffix(mark).rsplit(":", 2)
        return cls(constant, int(passed), int(place), mark)


def order(mine: CallPlace, theirs: CallPlace, exact: bool) -> Order:
    """The order of ``theirs``, seen from ``mine``. ``LATER`` if ``theirs`` has the mark ``SKIPPED``. Otherwise, if one
    rank finds ``EARLIER``, the other rank finds ``LATER``.

    Args:
        exact: whether the backend counts collectives only.
    """
    if theirs.mark == SKIPPED:
        return Order.LATER
    alike = (mine.constant, mine.passed) == (theirs.constant, theirs.passed)
    if mine.place == theirs.place or (alike and not exact):
        return Order.SAME
    if theirs.end <= mine.place:
        return Order.EARLIER
    if mine.end <= theirs.place:
        return Order.LATER
    return Order.SAME if alike else Order.UNKNOWN

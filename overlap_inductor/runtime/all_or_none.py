# SPDX-License-Identifier: Apache-2.0
"""``all_or_none``: an attempt that counts only if it succeeds on every rank of a group, for example an allocation.

The first rank of the group reads the others' results from the group's store, and writes its verdict there. All ranks
that get the verdict do the same: all go on, or all raise one text::

    rank 0                         rank 1                            rank 2
    attempt: succeeded             attempt: out of memory            attempt: succeeded
    reads all results              writes "failed: out of memory"    writes "succeeded"
    verdict: "rank 1 cannot ..."   NotOnAllRanks("rank 1 ...")       NotOnAllRanks("rank 1 ...")

If a rank writes nothing within the time limit, it counts as failed. If a rank gets no verdict within twice the limit,
it raises a text of its own. All ranks must make the same attempts in the same order. If an attempt is a collective and
fails on one rank, it must end on the other ranks, too.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout

SECONDS = 300.0
"""How long the first rank waits for the others by default. The group's timeout is the upper limit."""
SUCCEEDED, FAILED = "succeeded", "failed: "

Result = TypeVar("Result")


class NotOnAllRanks(OverlapError):
    """An attempt failed on a rank of the group, or this rank got no verdict. The text names a rank and the attempt."""


def _keys(owner: Owner) -> Iterator[str]:
    """Prefixes of keys in the group's store, one for each attempt of the group."""
    return (f"overlap_inductor/all_or_none/{owner.incarnation}/{number}" for number in itertools.count(1))


_KEYS = Kind("count of joint attempts (runtime.all_or_none)", _keys)
_LOCK = threading.Lock()
"""Held while a thread takes a key from a generator of ``_keys``: two threads must not advance one generator at once."""


def all_or_none(group: dist.ProcessGroup, what: str, attempt: Callable[[], Result], seconds: float = SECONDS) -> Result:
    """Return the result of ``attempt`` if it returned on every rank of ``group``. All ranks call this together.

    Args:
        what: the attempt, in words that complete "rank 1 cannot ...". All ranks pass the same words.
        seconds: how long the first rank waits for the others' results. It never waits longer than the group's timeout.

    Raises:
        NotOnAllRanks: ``attempt`` raised on a rank, or a result or the verdict did not come in time.
        OverlapError: the group was destroyed, and ``group_state`` holds no count of its attempts.
    """
    keys = _KEYS.of(group)
    with _LOCK:
        key = next(keys)
    cause: Exception | None = None
    try:
        result = attempt()
        said = SUCCEEDED
    except Exception as error:  # noqa: BLE001  (the other ranks must hear of any error)
        cause, said = error, f"{FAILED}{type(error).__name__}: {error}"
    verdict = _verdict(group, key, what, said, min(seconds, group_timeout(group).total_seconds()))
    if verdict != SUCCEEDED:
        raise NotOnAllRanks(verdict) from cause
    return result


def _verdict(group: dist.ProcessGroup, key: str, what: str, said: str, seconds: float) -> str:
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)
    if dist.get_backend(group) == "fake":
        # A dry run has no other ranks.
        return SUCCEEDED if said == SUCCEEDED else _text(group, what, {ranks[rank]: said})
    store = group_store(group)
    if rank:
        store.set(f"{key}/{rank}", said)
        # The first rank may wait ``seconds`` for another rank before it decides.
        found = _read(store, f"{key}/verdict", 2 * seconds)
        return found or (
            f"rank {ranks[rank]} cannot {what}, because rank {ranks[0]} has given no verdict for {2 * seconds:.0f} s."
            f" Has rank {ranks[0]} died?"
        )
    deadline = time.monotonic() + seconds
    heard = {ranks[peer]: _read(store, f"{key}/{peer}", deadline - time.monotonic()) for peer in range(1, len(ranks))}
    failed = {
        ranks[0]: said,
        **{
            peer: text or f"{FAILED}it has said nothing for {seconds:.0f} s; has it died?"
            for peer, text in heard.items()
        },
    }
    failed = {peer: text for peer, text in failed.items() if text != SUCCEEDED}
    verdict = _text(group, what, failed) if failed else SUCCEEDED
    store.set(f"{key}/verdict", verdict)
    return verdict


def _text(group: dist.ProcessGroup, what: str, failed: dict[int, str]) -> str:
    """The verdict's text. ``failed``: results of the ranks that failed, by global rank."""
    each = "; ".join(
        f"rank {rank} cannot {what} ({text.removeprefix(FAILED).strip()})" for rank, text in failed.items()
    )
    return f"{each}. So no rank of group {group.group_name!r} does."


def _read(store: dist.Store, key: str, seconds: float) -> str | None:
    try:
        store.wait([key], datetime.timedelta(seconds=max(seconds, 0.01)))
    except (RuntimeError, ValueError):
        return None
    return store.get(key).decode()

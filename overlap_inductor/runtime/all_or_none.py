# SPDX-License-Identifier: Apache-2.0
"""``all_or_none``: an attempt that counts only if it succeeds on every rank of a group, for example the allocation of
memory that all ranks map.

A rank that fails alone and raises would leave the others in a collective that it never joins. So each rank makes the
attempt. The first rank of the group reads the others' results from the group's store and writes its verdict there. The
others wait for the verdict. Only one rank decides. So all ranks that get the verdict do the same: all go on, or all
raise the same text::

    rank 0                         rank 1                            rank 2
    attempt: succeeded             attempt: out of memory            attempt: succeeded
    reads all results              writes "failed: out of memory"    writes "succeeded"
    verdict: "rank 1 cannot ..."   NotOnAllRanks("rank 1 ...")       NotOnAllRanks("rank 1 ...")

Every wait has a time limit. A rank that has written nothing within the limit counts as failed. A rank that gets no
verdict within twice the limit raises a text of its own, even if the others go on. An attempt may itself be a
collective. If one rank fails in it, this collective must also end on the other ranks, at the latest by its own timeout.
All ranks must make the same attempts in the same order. Each attempt has its own keys in the store. This module uses no
GPU; an attempt may use one.
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
    """An attempt failed on a rank of the group. The text names the rank and the attempt. The text is the first rank's
    verdict. Every rank that got the verdict in time has the same text."""


def _keys(owner: Owner) -> Iterator[str]:
    """Prefixes of keys in the group's store, one for each attempt of the group."""
    return (f"overlap_inductor/all_or_none/{owner.incarnation}/{number}" for number in itertools.count(1))


_KEYS = Kind("count of joint attempts (runtime.all_or_none)", _keys)
_LOCK = threading.Lock()
"""Guards the generators of keys, because only one thread at a time may use a generator."""


def all_or_none(group: dist.ProcessGroup, what: str, attempt: Callable[[], Result], seconds: float = SECONDS) -> Result:
    """Return the result of ``attempt`` if it returned on every rank of ``group``. All ranks call this together.

    Args:
        what: the attempt, in words that complete "rank 1 cannot ...", such as "allocate 512 bytes". All ranks pass the
            same words.
        seconds: how long the first rank waits for the others' results, at most the group's timeout.

    Raises:
        NotOnAllRanks: ``attempt`` raised on a rank, or a rank wrote no result in time, or the first rank wrote no
            verdict in time.
        OverlapError: the group was destroyed, and ``group_state`` holds nothing more for it.
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
        # This rank waits twice as long, because the first rank may wait ``seconds`` for another rank before it decides.
        found = _read(store, f"{key}/verdict", 2 * seconds)
        return found or _text(
            group, what, {ranks[0]: f"{FAILED}it has said nothing for {2 * seconds:.0f} s; has it died?"}
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

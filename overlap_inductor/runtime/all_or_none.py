"""``all_or_none``: something that every rank of a group must manage before any of them goes on, such as to allocate
memory that all map.

A rank that fails alone and raises would leave the others in a collective that it never joins. So each rank tries, says
through the group's store how it went, and waits for the verdict of the group's first rank, who has read all of them:
one reader, so that all ranks go on, or none does, with one text. ::

    rank 0                         rank 1                            rank 2
    attempt: managed               attempt: out of memory            attempt: managed
    reads what all have said       says "rank 1 cannot ..."          says that it has managed
    verdict: "rank 1 cannot ..."   NotOnAllRanks("rank 1 ...")       NotOnAllRanks("rank 1 ...")

What is waited for has a deadline; a rank that says nothing until then counts as one that failed. An attempt may itself
be a collective, if a rank that fails in it lets the others' end, at last by a timeout of their own. Ranks must make the
same attempts in one order. Nothing is waited for twice, and no GPU is involved.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.distributed import group_timeout

SECONDS = 300.0
"""That the first rank waits for the others, at most the group's timeout."""
MANAGED, FAILED = "managed", "failed: "

Result = TypeVar("Result")


class NotOnAllRanks(OverlapError):
    """A rank of the group has not managed what all must; raised on every rank, with the same text. The text names the
    rank, and what it could not do."""


class _Attempts:
    """Keys of a group's attempts in its store. A group whose name was a destroyed one's has other keys."""

    _incarnations: dict[str, int] = {}

    def __init__(self, name: str) -> None:
        self._incarnations[name] = self._incarnations.get(name, -1) + 1
        self._prefix, self._made = f"overlap_inductor/all_or_none/{self._incarnations[name]}", 0

    def next(self) -> str:
        self._made += 1
        return f"{self._prefix}/{self._made}"


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, _Attempts] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def all_or_none(group: dist.ProcessGroup, what: str, attempt: Callable[[], Result], seconds: float = SECONDS) -> Result:
    """The result of ``attempt`` where it returned one on every rank of ``group``. All ranks call this together, with
    the same ``what``: "allocate 512 bytes".

    Raises:
        NotOnAllRanks: on every rank alike, where it raised on one of them, or one has said nothing for ``seconds``.
    """
    with _LOCK:
        if group not in _OF_GROUP:
            _OF_GROUP[group] = _Attempts(group.group_name)
        key = _OF_GROUP[group].next()
    cause: Exception | None = None
    try:
        result = attempt()
        said = MANAGED
    except Exception as error:  # noqa: BLE001  (Whatever it is, the other ranks must hear of it.)
        cause, said = error, f"{FAILED}{type(error).__name__}: {error}"
    verdict = _verdict(group, key, what, said, min(seconds, group_timeout(group).total_seconds()))
    if verdict != MANAGED:
        raise NotOnAllRanks(verdict) from cause
    return result


def _verdict(group: dist.ProcessGroup, key: str, what: str, said: str, seconds: float) -> str:
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)
    if dist.get_backend(group) == "fake":
        # (A dry run: the other ranks are not there.)
        return MANAGED if said == MANAGED else _text(group, what, {ranks[rank]: said})
    store = group_store(group)
    if rank:
        store.set(f"{key}/{rank}", said)
        # (The first rank may wait as long for others before it says anything.)
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
    failed = {peer: text for peer, text in failed.items() if text != MANAGED}
    verdict = _text(group, what, failed) if failed else MANAGED
    store.set(f"{key}/verdict", verdict)
    return verdict


def _text(group: dist.ProcessGroup, what: str, failed: dict[int, str]) -> str:
    """What every rank is told; ``failed``: by global rank."""
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

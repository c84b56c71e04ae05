# SPDX-License-Identifier: Apache-2.0
"""``CallStore``: values and verdicts of a group's calls in the group's store. The docstring of
``call_board`` lists the keys.

A *call* is one run of a graph that holds a collective of the group. A rank's *value* of a call names the rank's plan
and the call's place: how many of the group's collectives the rank has issued before the call. A *verdict* says whether
anything is against running the call with overlap.
"""

from __future__ import annotations

import torch.distributed as dist

from overlap_inductor.runtime.call_page import CALLS
from overlap_inductor.runtime.call_page import Overwritten
from overlap_inductor.torch_compat.distributed import group_store

KEPT_CALLS = 64
"""Number of this rank's newest calls whose watched counts and verdicts stay in the store. In a CPU group no rank is
this many calls behind, because each call holds a collective, which blocks the host until all ranks have joined it."""


class CallStore:
    """Values and verdicts of a group's calls, by the call's label (``GroupState.label``). This class has the methods of
    ``CallPage``, but not ``watcher`` and ``differs``. Here, the argument ``call`` is a label, not the call's number.
    ``prefix``: the prefix of all keys.

    To delete a key, a rank waits for the store. So if the label is a number, a value's key has a *slot*: the number
    modulo ``CALLS``. A later call of the slot overwrites the value, which therefore begins with the number."""

    first_pause, growth = 1e-4, 1.5
    looks_cheaply = False

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._group, self._prefix, self._rank = group, prefix, group.rank()
        self._keys: dict[str, list[str]] = {}

    def publish(self, call: str, text: str, watched: bool = True) -> None:
        """Write this rank's value for ``call``. Without ``watched``, the value does not count in ``all_publish``, and
        this rank does not wait for the store if the label is a number."""
        store = group_store(self._group)
        if call.isdigit():
            store.set(self._slot(call, self._rank), f"{call} {text}")
        else:
            self._kept(call, self._key(call, self._rank))
            store.set(self._key(call, self._rank), text)
        if watched:
            self._kept(call, self._same(call, text))
            store.add(self._same(call, text), 1)

    def all_publish(self, call: str, text: str) -> bool:
        return group_store(self._group).add(self._same(call, text), 0) == self._group.size()

    def published(self, call: str, rank: int) -> str | None:
        """The value of ``rank`` for ``call``, or ``None`` if it has published none yet.

        Raises:
            Overwritten: the rank is ``CALLS`` or more calls ahead.
        """
        if not call.isdigit():
            return self._get(self._key(call, rank))
        found = self._get(self._slot(call, rank))
        if found is None:
            return None
        written, text = found.split(" ", 1)
        if int(written) > int(call):
            raise Overwritten
        return text if written == call else None

    def say(self, call: str, number: int | str, text: str) -> None:
        key = f"{self._key(call, self._rank)}/{number}"
        self._kept(call, key)
        group_store(self._group).set(key, text)

    def said(self, call: str, number: int | str, rank: int) -> str | None:
        return self._get(f"{self._key(call, rank)}/{number}")

    def _kept(self, call: str, *keys: str) -> None:
        """Remember the ``keys`` of a call, and delete the keys of all but the ``KEPT_CALLS`` newest calls."""
        self._keys.setdefault(call, []).extend(keys)
        while len(self._keys) > KEPT_CALLS:
            for key in self._keys.pop(next(iter(self._keys))):
                group_store(self._group).delete_key(key)

    def _key(self, call: str, rank: int) -> str:
        return f"{self._prefix}/{call}/{rank}"

    def _slot(self, call: str, rank: int) -> str:
        return f"{self._prefix}/slot{int(call) % CALLS}/{rank}"

    def _same(self, call: str, text: str) -> str:
        return f"{self._prefix}/{call}/same/{text}"

    def _get(self, key: str) -> str | None:
        store = group_store(self._group)
        return store.get(key).decode() if store.check([key]) else None

# SPDX-License-Identifier: Apache-2.0
"""``ByStorage``: a dictionary whose keys are the memory of tensors. Tensor objects cannot be keys: a tensor that was
saved for backward, for example, is a new object in the same memory at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class ByStorage(Generic[T]):
    """A dictionary whose keys are sequences of tensors, compared by storage and offset. The address does not count:
    FSDP2 frees and reallocates the memory of a parameter's storage.

    An entry keeps no memory alive. Once no tensor has one of the entry's storages any more, no key can equal the
    entry's, so ``get`` does not find the entry. The next ``put`` drops it. Until then, the entry's weak reference
    reserves the storage's ``_cdata``, so that no new storage gets it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[T, list[StorageWeakRef]]] = {}

    def get(self, tensors: Sequence[torch.Tensor]) -> T | None:
        entry = self._found.get(_places(tensors))
        return entry[0] if entry is not None else None

    def put(self, tensors: Sequence[torch.Tensor], value: T) -> None:
        for key in [k for k, (_, weak) in self._found.items() if any(w.expired() for w in weak)]:
            del self._found[key]
        self._found[_places(tensors)] = value, [StorageWeakRef(t.untyped_storage()) for t in tensors]

    def __len__(self) -> int:
        return len(self._found)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    # Views of one storage differ in their offset.
    return tuple([n for t in tensors for n in (t.untyped_storage()._cdata, t.storage_offset())])

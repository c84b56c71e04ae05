# SPDX-License-Identifier: Apache-2.0
"""``CallPage``: memory that all ranks of a group on one machine map. At each call of a graph, each rank writes there
its *value*: which plan it runs. Then it may write *verdicts*: whether the ranks may overlap (``call_board``). A rank
sees in about a microsecond whether all others run the same plan. (Without a page, ranks
use the group's store, which takes a fraction of a millisecond: ``call_store.CallStore``.)

::

    page[call % CALLS][number][rank]    one entry of ENTRY bytes, written by that rank alone
    number 0                            the rank's value for the call
    number 1 .. MOST_ROUNDS             its verdicts. In each round of a comparison, a rank publishes a
                                        verdict and reads the others' verdicts (``agreement``). Verdicts of
                                        further rounds go through the store
    entry                               CRC-32 of the rest, call, length of the text, text

Memory ordering: a reader accepts an entry only if its checksum fits. So an entry that is half written, or whose stores
arrive out of order, counts as not written yet. An entry is overwritten ``CALLS`` calls later. A rank that does not wait
for the others may be that far ahead, and a reader of its entry then raises ``Overwritten``.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from overlap_inductor.runtime import shared_file
from overlap_inductor.runtime.all_or_none import all_or_none
from overlap_inductor.torch_compat.distributed import group_store

CALLS = 128
MOST_ROUNDS = 5
ENTRY = 80
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<QB")
MOST_CHARACTERS = ENTRY - _CHECKSUM.size - _HEAD.size


class Overwritten(Exception):
    """The rank whose entry is read is ``CALLS`` or more calls ahead, and has overwritten the entry."""


class CallPage:
    """Values and verdicts of a group's calls.

    Args:
        memory: ``page_bytes(size)`` bytes, zeros at first, that all ranks map.
    """

    first_pause, growth = 0.0, 1.05
    """``first_pause``: a waiting rank's first pause between two reads, in seconds. ``growth``: the factor from one
    pause to the next, once pauses are not 0 (``call_board._next_pause``)."""
    looks_cheaply = True
    """True: an entry costs little to read. So a waiting rank reads every other rank's entry after each pause, not only
    after long pauses."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size

    def publish(self, call: int, text: str) -> None:
        """Write this rank's value for ``call``: ASCII, at most ``MOST_CHARACTERS``. Raises ``ValueError`` if longer."""
        self._write(call, 0, text)

    def all_publish(self, call: int, text: str) -> bool:
        """Whether every rank of the group, this one included, has published ``text`` for ``call``."""
        return self.watcher(call, text)()

    def watcher(self, call: int, text: str) -> Callable[[], bool]:
        """A function that returns what ``all_publish`` returns, with less host time."""
        start, expected = self._offset(call, 0, 0), _entry(call, text) * self._size
        memory, end = self._memory, start + len(expected)
        return lambda: memory[start:end] == expected

    def differs(self, call: int, text: str) -> bool:
        """Whether a rank has published another value than ``text`` for ``call``, or is too many calls ahead."""
        try:
            return any(self._read(call, 0, rank) not in (None, text) for rank in range(self._size))
        except Overwritten:
            return True

    def published(self, call: int, rank: int) -> str | None:
        """The value of ``rank`` for ``call``, or ``None`` if it has published none yet.

        Raises:
            Overwritten: the rank is too many calls ahead.
        """
        return self._read(call, 0, rank)

    def say(self, call: int, number: int, text: str) -> None:
        """Write this rank's verdict in round ``number`` of ``call``. Rounds count from 0, up to ``MOST_ROUNDS - 1``."""
        self._write(call, 1 + number, text)

    def said(self, call: int, number: int, rank: int) -> str | None:
        """The verdict of ``rank`` in round ``number`` of ``call``, or ``None`` if it has given none yet.

        Raises:
            Overwritten: the rank is too many calls ahead.
        """
        return self._read(call, 1 + number, rank)

    def _offset(self, call: int, number: int, rank: int) -> int:
        return ((call % CALLS * (1 + MOST_ROUNDS) + number) * self._size + rank) * ENTRY

    def _write(self, call: int, number: int, text: str) -> None:
        start = self._offset(call, number, self._rank)
        self._memory[start : start + ENTRY] = _entry(call, text)

    def _read(self, call: int, number: int, rank: int) -> str | None:
        start = self._offset(call, number, rank)
        entry = self._memory[start : start + ENTRY]
        if _CHECKSUM.unpack_from(entry)[0] != zlib.crc32(entry[_CHECKSUM.size :]):
            return None
        written, length = _HEAD.unpack_from(entry, _CHECKSUM.size)
        if written > call:
            raise Overwritten
        begin = _CHECKSUM.size + _HEAD.size
        return entry[begin : begin + length].decode() if written == call else None


def _entry(call: int, text: str) -> bytes:
    words = text.encode()
    if len(words) > MOST_CHARACTERS:
        raise ValueError(f"{text!r} has more than {MOST_CHARACTERS} characters")
    rest = _HEAD.pack(call, len(words)) + words.ljust(MOST_CHARACTERS, b"\0")
    return _CHECKSUM.pack(zlib.crc32(rest)) + rest


def page_bytes(size: int) -> int:
    """Bytes of the page of a group of ``size`` ranks."""
    return CALLS * (1 + MOST_ROUNDS) * ENTRY * size


def shared_page(group: dist.ProcessGroup, key: str) -> CallPage:
    """Make the page of ``group``. All its ranks call this together.

    Args:
        key: key in the group's store, used once. The first rank writes the name of the page's file under this key.

    Raises:
        NotOnAllRanks: on all ranks, if a rank cannot make or map the file in ``/dev/shm``.
    """
    store, rank, size = group_store(group), group.rank(), group.size()
    path = shared_file.path_of(shared_file.new_number())

    def attempt() -> mmap.mmap:
        if rank:
            name = store.get(key).decode()
            if not name:
                raise OSError("the first rank could not make it")
            return _mapped(shared_file.SHARED_FOLDER / name, page_bytes(size))
        try:
            shared_file.make_file(path, page_bytes(size))
            memory = _mapped(path, page_bytes(size))
        except OSError:
            store.set(key, "")
            raise
        store.set(key, path.name)
        return memory

    try:
        memory = all_or_none(group, f"map a file of {shared_file.SHARED_FOLDER}", attempt)
    finally:
        if not rank:
            path.unlink(missing_ok=True)
    return CallPage(memory, rank, size)


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)

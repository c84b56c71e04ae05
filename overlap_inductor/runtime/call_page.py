"""The page of a group's calls: memory of one machine that all ranks of the group map, where each writes which plan it
runs at each call.

A rank sees in about a microsecond whether all others run the same, so plans are compared at every call, on GPUs too.
The store of a group serves the same ends in a fraction of a millisecond (``call_board.CallStore``); it is used for what
comes before the page, and for groups whose ranks are not on one machine.

::

    page[call % CALLS][number][rank]    one entry of ENTRY bytes, written by that rank alone
    number 0                            what the rank publishes for the call
    number 1 .. MOST_ROUNDS             its verdicts
    entry                               CRC-32 of the rest, call, length of the text, text

Memory ordering: a reader takes an entry only if its checksum fits, so an entry that is half written, or whose stores
arrive out of order, is one that is not there yet. An entry is written again ``CALLS`` calls later. A rank that waits
for the others cannot be so far ahead; one that does not wait (it overlaps nothing) may be, and a reader is told so
(``Overwritten``).
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import zlib
from pathlib import Path

import torch.distributed as dist

from overlap_inductor.runtime.all_or_none import all_or_none
from overlap_inductor.runtime.board import SHARED_FOLDER
from overlap_inductor.torch_compat.distributed import group_store

CALLS = 128
MOST_ROUNDS = 5
ENTRY = 64
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<QB")
MOST_CHARACTERS = ENTRY - _CHECKSUM.size - _HEAD.size


class Overwritten(Exception):
    """The rank that is asked about is ``CALLS`` or more calls ahead."""


class CallPage:
    """What the ranks of a group say of their calls, in ``memory`` that all of them map.

    Args:
        memory: ``page_bytes(size)`` bytes, zeros at first.
        rank / size: of the group.
    """

    first_pause, growth = 0.0, 1.05
    """Seconds between the first two looks of a rank that waits, and by what that grows: it sees the others soon."""
    looks_cheaply = True

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size

    def publish(self, call: int, text: str) -> None:
        """Say what this rank runs at ``call``; at most ``MOST_CHARACTERS`` of ASCII."""
        self._write(call, 0, text)

    def all_publish(self, call: int, text: str) -> bool:
        """Whether every rank of the group has published ``text`` for ``call``."""
        start = self._offset(call, 0, 0)
        return self._memory[start : start + ENTRY * self._size] == _entry(call, text) * self._size

    def published(self, call: int, rank: int) -> str | None:
        """What ``rank`` has published for ``call``; ``None`` if it has not yet.

        Raises:
            Overwritten: it is too many calls ahead.
        """
        return self._read(call, 0, rank)

    def say(self, call: int, number: int, text: str) -> None:
        """Give a verdict in round ``number`` of ``call``."""
        self._write(call, 1 + number, text)

    def said(self, call: int, number: int, rank: int) -> str | None:
        """The verdict of ``rank``; ``None`` if it has given none yet. Raises ``Overwritten``."""
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
    """Bytes of the page of a group of ``size`` ranks: 6 KiB a call for 16 ranks."""
    return CALLS * (1 + MOST_ROUNDS) * ENTRY * size


def shared_page(group: dist.ProcessGroup, key: str) -> CallPage:
    """The page of ``group``. All its ranks call this together; ``key``: in the group's store, used once.

    Raises:
        NotOnAllRanks: the ranks have no memory in common (they are on several machines, or ``/dev/shm`` is not the same
            folder for all of them); on all ranks.
    """
    store, rank, size = group_store(group), group.rank(), group.size()

    def attempt() -> mmap.mmap:
        if rank:
            name = store.get(key).decode()
            if not name:
                raise OSError("the first rank could not make it")
            return _mapped(SHARED_FOLDER / name, page_bytes(size))
        path = SHARED_FOLDER / f"overlap_inductor_{secrets.randbits(62):016x}"
        made.append(path)
        try:
            memory = _made(path, page_bytes(size))
        except OSError:
            store.set(key, "")
            raise
        store.set(key, path.name)
        return memory

    made: list[Path] = []
    try:
        memory = all_or_none(group, f"map a file of {SHARED_FOLDER}", attempt)
    finally:
        # (The memory stays for as long as somebody maps it.)
        for path in made:
            path.unlink(missing_ok=True)
    return CallPage(memory, rank, size)


def _made(path: Path, size: int) -> mmap.mmap:
    with path.open("xb") as file:
        # (A file of zeros that takes no room yet would end the process with SIGBUS once the folder is full.)
        os.posix_fallocate(file.fileno(), 0, size)
    return _mapped(path, size)


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)

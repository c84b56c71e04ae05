# SPDX-License-Identifier: Apache-2.0
"""``WorkspaceArena`` assigns bytes of a group's symmetric memory to sites.

A group has a few *slots*. A call of a site holds one slot from its start to its end. The sites of a graph take the
slots in turn, in the plan's order. Sites of other graphs may use the same slots, because calls of a rank run one after
the other (``runtime.call_order``).

A rank must not write into a slot that a peer still reads. Three protocols ensure this. ``CREDITS``: the peer gives a
credit when its call ends (``kernels.signals.credit_flag``), and reads only its own memory. ``READS``: likewise, but
ranks write rows only to their own memory, and read their peers'. So a rank waits for the credits of all peers before
it writes.
``HALVES``: calls use the two halves of the slot in turn (``kernels.small_message``). ``MESSAGES``: each pair of ranks
counts its messages, and the sender waits until the receiver has taken the previous one (``kernels.messages``).

``prepare`` allocates a graph's slots at the graph's first run, during which no CUDA graph may be captured. A site with
dynamic sizes requests memory for a planned maximum. A call above the maximum runs without overlap. Slots are never
moved, grown or freed while the group lives, because captured CUDA graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Protocol

import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import QUEUE_WORDS

ALIGNMENT = 1024
TILE_BYTES = 2048
"""Bytes of the smallest tile: 128 rows of 8 elements of two bytes."""
SLOTS = 2
"""The largest number of slots that a graph's sites of one protocol take in turn."""
CREDITS, HALVES, READS, MESSAGES = "credits", "halves", "reads", "messages"
"""Protocols that keep the calls of a slot apart."""
Need = tuple[int, int] | tuple[int, int, str]
"""``(bytes, signals)`` of a call's slot. A protocol other than ``CREDITS`` follows."""


class Buffer(Protocol):
    """One symmetric allocation as an arena uses it (``torch_compat.symmetric.SymmetricBuffer``)."""

    @property
    def local(self) -> torch.Tensor: ...
    @property
    def peers(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def pointers(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Request:
    """The workspace that one site needs.

    Attributes:
        nbytes: number of bytes that peers write or read.
        signals: number of signals that each peer sends in a call.
        protocol: ``CREDITS``, ``HALVES``, ``READS`` or ``MESSAGES``.
    """

    site: str
    nbytes: int
    signals: int
    protocol: str = CREDITS


@dataclass(frozen=True)
class Slot:
    """Bytes and flags for one call at a time.

    Attributes:
        nbytes, signals: number of bytes of ``data``, and number of signals that each rank can send in a call.
        data: uint8 ``[nbytes]`` on every rank.
        flags: int32 on every rank (``kernels.layout``). ``calls``, ``queues`` and ``tiles`` follow in the same
            allocation, because the ranks would have to agree on every further allocation.
        calls: int32 ``[1]`` on the device, number of this rank's calls that have used the slot.
        queues: int32 on the device: words in which the blocks of a kernel count work. First come ``QUEUE_WORDS`` words,
            then one word per rank and signal. Between calls, all but word ``layout.ANNOUNCED`` are zero. With
            ``MESSAGES``, the words per rank and signal count messages.
        tiles: int32 on the device: words with which blocks signal finished tiles to each other, one for each
            ``TILE_BYTES`` of ``nbytes``. All are zero between calls.
    """

    nbytes: int
    signals: int
    data: Buffer
    flags: Buffer
    calls: torch.Tensor
    queues: torch.Tensor
    tiles: torch.Tensor
    protocol: str = CREDITS


def slots_for(requests: Sequence[Request], count: int) -> list[tuple[int, int]]:
    """``(nbytes, signals)`` of at most ``count`` slots that ``requests``, all of one protocol, take in turn."""
    used = min(count, len(requests))
    return [
        (max(_aligned(r.nbytes) for r in requests[i::used]), max(r.signals for r in requests[i::used]))
        for i in range(used)
    ]


def planned_bytes(requests: Sequence[Request], count: int, world_size: int) -> int:
    """Bytes on each rank that ``prepare`` allocates for these sites in an empty arena."""
    return sum(_slot_bytes(world_size, *sizes) for alike in _by_protocol(requests) for sizes in slots_for(alike, count))


def _by_protocol(requests: Sequence[Request]) -> list[list[Request]]:
    return [[r for r in requests if r.protocol == protocol] for protocol in dict.fromkeys(r.protocol for r in requests)]


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def _flag_words(world_size: int, signals: int) -> int:
    return world_size * (1 + signals) * FLAG_WORDS


def _own_words(world_size: int, nbytes: int, signals: int) -> tuple[int, int, int]:
    """int32 words of ``calls``, ``queues`` and ``tiles``."""
    return 1, QUEUE_WORDS + world_size * signals, -(-nbytes // TILE_BYTES)


def _slot_bytes(world_size: int, nbytes: int, signals: int) -> int:
    return nbytes + (_flag_words(world_size, signals) + sum(_own_words(world_size, nbytes, signals))) * 4


def _suffices(slot: Slot | None, request: Request) -> bool:
    return (
        slot is not None
        and slot.nbytes >= request.nbytes
        and slot.signals >= request.signals
        and slot.protocol == request.protocol
    )


@dataclass
class WorkspaceArena:
    """The slots of one group on one device.

    Args:
        allocate: ``(elements, dtype) -> Buffer`` of zeros. All ranks of the group call it together, and it raises on
            all of them or on none.
        capturing: whether a CUDA graph is being captured on the current stream.
        limit: bytes that all slots together may take on a rank.
    """

    world_size: int
    device: torch.device
    allocate: Callable[[int, torch.dtype], Buffer]
    capturing: Callable[[], bool]
    limit: int
    slots: list[Slot] = field(default_factory=list)
    _of_site: dict[tuple[str, str], Slot] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on a rank, flags included."""
        return sum(_slot_bytes(self.world_size, s.nbytes, s.signals) for s in self.slots)

    def prepare(self, requests: Sequence[Request], count: int = SLOTS) -> None:
        """Give a slot to every site that has no slot or too small a slot. The sites of each protocol take at most
        ``count`` slots in turn: existing slots that suffice, otherwise new ones. All ranks call this with equal
        arguments. If it raises, the arena is as before.

        Raises:
            OverlapError: memory would have to be allocated while a CUDA graph is captured, or beyond the limit.
            NotOnAllRanks: a rank has no memory left.
        """
        slots, of_site = list(self.slots), dict(self._of_site)
        try:
            for alike in _by_protocol(requests):
                self._prepare(alike, count)
        except BaseException:
            # The first protocol may already have slots when the second one fails.
            self.slots, self._of_site = slots, of_site
            raise

    def _prepare(self, requests: Sequence[Request], count: int) -> None:
        unknown, wanted, chosen = self._choose(requests, count)
        if not unknown:
            return
        missing = [sizes for sizes, slot in zip(wanted, chosen, strict=True) if slot is None]
        if missing:
            self._check(missing, unknown)
        ready = [slot or self._new(*sizes, unknown[0].protocol) for sizes, slot in zip(wanted, chosen, strict=True)]
        # Slots are added only if all of them were made, so that all ranks hold the same slots.
        self.slots += [new for new, slot in zip(ready, chosen, strict=True) if slot is None]
        for i, request in enumerate(unknown):
            self._of_site[request.site, request.protocol] = ready[i % len(ready)]

    def missing_bytes(self, requests: Sequence[Request], count: int = SLOTS) -> int:
        """Bytes that ``prepare`` would have to allocate on a rank."""
        pairs = [pair for alike in _by_protocol(requests) for pair in zip(*self._choose(alike, count)[1:], strict=True)]
        return sum(_slot_bytes(self.world_size, *sizes) for sizes, slot in pairs if slot is None)

    def _choose(
        self, requests: Sequence[Request], count: int
    ) -> tuple[list[Request], list[tuple[int, int]], list[Slot | None]]:
        """Returns three lists for requests of one protocol:

        * the requests of sites that have no slot or too small a slot;
        * the sizes of the slots that these requests take in turn;
        * for each size, an existing slot that suffices, or ``None``.
        """
        unknown = [self._at_least_as_before(r) for r in requests if not self.holds(r)]
        wanted = slots_for(unknown, count)
        free = [s for s in self.slots if unknown and s.protocol == unknown[0].protocol]
        chosen: list[Slot | None] = []
        for nbytes, signals in wanted:
            fitting = next((s for s in free if s.nbytes >= nbytes and s.signals >= signals), None)
            chosen.append(fitting)
            if fitting is not None:
                free.remove(fitting)
        return unknown, wanted, chosen

    def _at_least_as_before(self, request: Request) -> Request:
        """``request``, enlarged to the size of the site's slot, because earlier graphs rely on that size."""
        slot = self._of_site.get((request.site, request.protocol))
        return (
            request
            if slot is None
            else replace(request, nbytes=max(request.nbytes, slot.nbytes), signals=max(request.signals, slot.signals))
        )

    def _check(self, missing: list[tuple[int, int]], requests: list[Request]) -> None:
        names = ", ".join(r.site for r in requests[:4]) + (", ..." if len(requests) > 4 else "")
        if self.capturing():
            raise OverlapError(
                f"sites {names} need workspace while a CUDA graph is being captured, and none can be allocated then. "
                "Run the compiled function once before capturing it."
            )
        more = sum(_slot_bytes(self.world_size, *sizes) for sizes in missing)
        if self.nbytes + more > self.limit:
            raise OverlapError(
                f"sites {names} need {more} bytes of workspace beyond the {self.nbytes} that their group holds; the"
                f" limit is {self.limit} bytes. Raise OVERLAP_INDUCTOR_WORKSPACE_LIMIT (in MiB)."
            )

    def _new(self, nbytes: int, signals: int, protocol: str) -> Slot:
        flag_words, own = _flag_words(self.world_size, signals), _own_words(self.world_size, nbytes, signals)
        data = self.allocate(nbytes, torch.uint8)
        flags = self.allocate(flag_words + sum(own), torch.int32)
        calls, queues, tiles = flags.local[flag_words:].split(own)
        return Slot(nbytes, signals, data, flags, calls, queues, tiles, protocol)

    def holds(self, request: Request) -> bool:
        """Whether the site has a slot that is large enough for ``request``."""
        return _suffices(self._of_site.get((request.site, request.protocol)), request)

    def knows(self, site: str, protocol: str = CREDITS) -> bool:
        return (site, protocol) in self._of_site

    def slot(self, site: str, protocol: str = CREDITS) -> Slot:
        """The site's slot.

        Raises:
            OverlapError: ``prepare`` gave the site none.
        """
        found = self._of_site.get((site, protocol))
        if found is None:
            raise OverlapError(f"site {site} has no workspace: its graph was not prepared before its first run")
        return found

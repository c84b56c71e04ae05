# SPDX-License-Identifier: Apache-2.0
"""Transports from outside the package: one ``PeerCopies``, one ``Exchanges`` and one ``WholeCollectives`` (the classes
of ``transports.transport``). They run on CPUs and count their transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports import registry
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Message
from overlap_inductor.transports.transport import Send
from overlap_inductor.transports.transport import Share


@dataclass
class Courier:
    """A ``PeerCopies`` transport: copies each part's rows with a plain tensor copy, then the part's flag. If the group
    is aborted, a ``guarded`` send copies no flag."""

    name: str = "courier"
    fastest_from: int | None = None
    carried: int = 0
    moved_by = "plain tensor copies"
    needs_sms = False

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        from overlap_inductor.transports.credits import announced

        slot, word = launch.slot, announced(launch)

        def send(source: torch.Tensor) -> None:
            for number in numbers:
                piece = transfer.piece(number, launch.rank, launch.world_size)
                row_bytes = transfer.width * source.element_size()
                first, last = (row * row_bytes for row in (piece.target, piece.target + piece.rows))
                rows = source[piece.source : piece.source + piece.rows].contiguous().view(torch.uint8)
                slot.data.peers[piece.peer][first:last].copy_(rows.flatten())
                if not (guarded and slot_is_aborted(launch)):
                    at = transfer.flag(number, launch.rank, launch.world_size, slot.signals)
                    slot.flags.peers[piece.peer][at : at + 1].copy_(word)
                self.carried += 1

        return send


def slot_is_aborted(launch: Launch) -> bool:
    """Whether the group's abort word is set."""
    return bool(launch.faults.stop[0])


@dataclass
class Pigeons:
    """An ``Exchanges`` transport on the group's own backend. The sender inverts all bits, and the receiver inverts them
    back."""

    name: str = "pigeons"
    carried: int = 0
    moved_by = "messages of inverted bits"

    def why_not(self, group_name: str, device: torch.device) -> str | None:
        return None

    def receives_first(self, device: torch.device) -> bool:
        return True

    def join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        pass

    def start(
        self, group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Sequence[_Flight]:
        flights = []
        for message in receives:
            box = torch.empty(message.tensor.nbytes, dtype=torch.uint8)
            work = dist.irecv(box, dist.get_global_rank(group, message.peer), group, message.tag)
            flights.append(_Flight(work, box, message.tensor))
        for message in sends:
            box = message.tensor.reshape(-1).view(torch.uint8).bitwise_not()
            flights.append(_Flight(dist.isend(box, dist.get_global_rank(group, message.peer), group, message.tag), box))
            self.carried += 1
        return flights


@dataclass
class _Flight:
    """A message in flight. ``into``: the tensor into which a received message is decoded."""

    work: Any
    box: torch.Tensor
    into: torch.Tensor | None = None

    def wait(self) -> None:
        self.work.wait()
        if self.into is not None:
            self.into.copy_(self.box.bitwise_not().view(self.into.dtype))


@dataclass
class Choir:
    """A ``WholeCollectives`` transport: every rank gathers all sources and sums them."""

    name: str = "choir"
    carried: int = 0
    moved_by = "gathers that each rank sums"

    def forked(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return nullcontext(nullcontext())

    def reduce_rows(self, result: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
        everyone = [torch.empty_like(source) for _ in range(group.size())]
        dist.all_gather(everyone, source, group=group)
        total = torch.stack(everyone).float().sum(0)
        result.copy_(total if result is source else total.chunk(group.size())[group.rank()])
        self.carried += 1


@contextmanager
def registered(transport: Any) -> Iterator[Any]:
    """Register ``transport`` inside the block."""
    registry.register(transport)
    try:
        yield transport
    finally:
        registry.unregister(transport)

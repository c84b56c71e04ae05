# SPDX-License-Identifier: Apache-2.0
"""The four protocols of transports. A transport moves a schedule's bytes.

==================== =====================================================================
protocol             who acts
==================== =====================================================================
``PeerCopies``       the sender alone writes into its peers' memory and sets their flags
``PeerReads``        the receiver alone reads its peers' memory, after they have set its flags
``Exchanges``        the hosts of sender and receiver each post a message
``WholeCollectives`` all ranks call one collective
==================== =====================================================================

A schedule drives one protocol, with any registered transport that implements it (``transports.registry``). A schedule
whose own kernel stores to peers drives no transport. Switches and reports then name its transport ``sm_push``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import torch
import torch.distributed as dist

from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports.transfer import Transfer

Send = Callable[[torch.Tensor], None]
"""Starts the transfer of a source ``[any rows, width]`` on the current stream. The receivers' flags are set when the
rows have arrived."""


class Transport(Protocol):
    """What all transports have. ``moved_by`` says in a few words what moves the bytes."""

    @property
    def name(self) -> str: ...

    @property
    def moved_by(self) -> str: ...


@dataclass(frozen=True)
class Share:
    """What a schedule allows a transport while its matmuls run.

    Attributes:
        sms: SMs that the transport may occupy.
        turns_from: if all pieces of a send have at least this many bytes, pieces wait for their turn
            (``transports.copy_engine``). ``None``: no piece waits.
    """

    sms: int = 0
    turns_from: int | None = None


@runtime_checkable
class PeerCopies(Transport, Protocol):
    """One-sided copies into the peers' memory, each followed by a flag."""

    @property
    def needs_sms(self) -> bool:
        """Whether a transfer needs room on an SM. If so, the transport cannot serve a kernel that occupies every SM."""
        ...

    @property
    def fastest_from(self) -> int | None:
        """In bytes. For pieces of at least this size, the transport is faster than every transport with a smaller
        ``fastest_from``. ``None``: used only if the user names it."""
        ...

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        """Make parts ``numbers`` of ``transfer`` ready to be sent in that order. The caller waits for the receivers'
        credits on the stream before it starts a send.

        Args:
            source: an example of what will be sent: ``[any rows, width]``, 16-bit or fp8, contiguous, aligned to 16
                bytes.
            guarded: True if what is sent depends on other waits in the same call of the op, not only on the waits for
                credits. If such a wait times out, the transport must set no flag, or set flags to a number that no rank
                waits for.
        """
        ...


@dataclass(frozen=True)
class Reads:
    """Prepared reads of a part that each rank has for all others. Both functions queue work on the current stream.

    Attributes:
        announce: ``announce()`` sets the part's flag at every peer: this rank's part may be read.
        read: ``read(places)`` copies the part of every rank ``r``, this rank included, to ``places[r]``. Call it on a
            stream that has waited for the flags (``arrivals.wait_kernel``). ``places [ranks, rows, width]`` may be a
            view whose rows are apart.
    """

    announce: Callable[[], None]
    read: Callable[[torch.Tensor], None]


@runtime_checkable
class PeerReads(Transport, Protocol):
    """Copies out of the peers' memory. A rank writes only its own memory, and only after its peers have ended the call
    that read it. So the slot has protocol ``runtime.arena.READS``, and the caller waits for credits before it writes
    what peers read."""

    def prepare_reads(self, launch: Launch, transfer: Transfer, example: torch.Tensor) -> Reads:
        """Make the only part of ``transfer`` ready to be read. In the slot of each rank, the part begins at row
        ``transfer.origin``. ``example``: a tensor of the dtype that is read, on the launch's device."""
        ...


@dataclass(frozen=True)
class Message:
    """A contiguous ``tensor`` to or from rank ``peer`` of the group. ``tag`` is equal on both ranks, and unique among
    the messages in flight between them."""

    tensor: torch.Tensor
    peer: int
    tag: int


class Pending(Protocol):
    def wait(self) -> object:
        """After this, work on the current stream may read the received tensors and overwrite the sent ones. Raises
        ``RuntimeError`` if a message failed."""
        ...


@runtime_checkable
class Exchanges(Transport, Protocol):
    """Messages between ranks, which sender and receiver each start."""

    def why_not(self, group_name: str, device: torch.device) -> str | None:
        """Why the group cannot exchange tensors on ``device``, or ``None`` if it can. The answer is equal on all
        ranks."""
        ...

    def receives_first(self, device: torch.device) -> bool:
        """True: all receives of an exchange start before its first send. False: they start with the sends of their
        hop."""
        ...

    def join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make what only all ranks together can make, for example a communicator. All ranks call this before an
        exchange in which a rank may have no message. Raises ``RuntimeError`` if it fails."""
        ...

    def start(
        self, group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Sequence[Pending]:
        """Start the messages of one hop. Raises ``RuntimeError`` if one cannot be started."""
        ...


@runtime_checkable
class WholeCollectives(Transport, Protocol):
    """Collectives of all ranks, on a stream of their own."""

    def forked(self, device: torch.device) -> AbstractContextManager[AbstractContextManager[Any]]:
        """Two nested contexts:

        * The outer one joins the streams. At its start, the transport's stream waits for the caller's stream. At its
          end, the caller's stream waits for the transport's stream.
        * It yields the inner one, in which the transport's stream is the current stream.
        """
        ...

    def reduce_rows(self, result: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum ``source`` over the ranks, on the current stream. If ``result`` is ``source``, this is an all-reduce in
        place. Otherwise it is a reduce-scatter: rank ``r`` gets share ``r`` of the rows."""
        ...

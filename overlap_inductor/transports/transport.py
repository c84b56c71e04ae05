# SPDX-License-Identifier: Apache-2.0
"""``PeerCopies``, ``Exchanges`` and ``WholeCollectives``: the three protocols of transports, which move a schedule's
bytes.

A schedule drives one protocol and can use every registered transport that implements it (``transports.registry``). The
protocols differ in who acts:

* ``PeerCopies``: the sender alone writes into its peers' memory and sets their flags.
* ``Exchanges``: the hosts of sender and receiver both post a message.
* ``WholeCollectives``: all ranks call one collective.

If a schedule's own kernel stores to peers, the schedule drives no transport. Switches and reports then give
``sm_push`` as its transport. The registered transport ``SmPush`` has the same name.
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
"""Starts the transfer of a source ``[any rows, width]`` on the current stream, after the work that is queued there. The
receivers' flags are set when the rows have arrived."""


class Transport(Protocol):
    """What all transports have: a name for the configuration, and a few words that say what moves the bytes."""

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
            (``transports.copy_engine`` says which pieces wait). A receiver then gets pieces from one rank at
            a time. ``None``: no piece waits.
    """

    sms: int = 0
    turns_from: int | None = None


@runtime_checkable
class PeerCopies(Transport, Protocol):
    """One-sided copies into the peers' symmetric memory, each followed by a flag."""

    @property
    def needs_sms(self) -> bool:
        """Whether a transfer needs room on an SM. Such a transport cannot serve a kernel that occupies every SM while
        it waits for the transfer."""
        ...

    @property
    def fastest_from(self) -> int | None:
        """A limit in bytes. For pieces of at least this size, the transport is faster than all transports with a lower
        limit. ``None``: the transport is used only if the user names it."""
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
        """Make parts ``numbers`` of ``transfer`` ready to be sent in that order.

        The caller waits for the receivers' credits on the stream before it starts a send. The flag of a part is set at
        its receiver when the part has arrived.

        Args:
            numbers: numbers of parts, see ``Transfer``.
            source: an example of what will be sent: ``[any rows, width]``, 16-bit or fp8, contiguous, aligned to 16
                bytes.
            guarded: True if what is sent depends on waits of this call other than those for credits. If one of these
                waits timed out, the transport must not announce what it sends. It sets no flag, or sets the flags to a
                number that no rank waits for.
        """
        ...


@dataclass(frozen=True)
class Message:
    """A contiguous ``tensor`` that is sent to, or received from, ``peer`` (a rank of the group). ``tag`` is equal on
    both ranks and unique among the messages in flight between them."""

    tensor: torch.Tensor
    peer: int
    tag: int


class Pending(Protocol):
    """Messages that were started and may not be complete."""

    def wait(self) -> object:
        """Return when work on the current stream may read the received tensors and overwrite the sent ones. Raises
        ``RuntimeError`` if a message failed."""
        ...


@runtime_checkable
class Exchanges(Transport, Protocol):
    """Messages between ranks, which sender and receiver both start."""

    def why_not(self, group_name: str, device: torch.device) -> str | None:
        """Why the group cannot exchange tensors on ``device``, or ``None`` if it can. The answer must be the same on
        all ranks of the group."""
        ...

    def receives_first(self, device: torch.device) -> bool:
        """Whether all receives of an exchange are started before its first send. Otherwise a hop's receives and sends
        are started together."""
        ...

    def join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make what messages need, if all ranks of the group must make it together: for example a communicator. All
        ranks call this before an exchange in which one of them may have no message. Raises ``RuntimeError`` if it
        fails."""
        ...

    def start(
        self, group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Sequence[Pending]:
        """Start the messages of one hop. Raises ``RuntimeError`` if one cannot be started."""
        ...


@runtime_checkable
class WholeCollectives(Transport, Protocol):
    """Collectives of all ranks, on a stream other than the one that computes what they send."""

    def forked(self, device: torch.device) -> AbstractContextManager[AbstractContextManager[Any]]:
        """An outer context. When it begins, the transport's stream waits for the caller's stream. When it ends, the
        caller's stream waits for the transport's stream. It yields an inner context, in which the transport's stream is
        the current stream."""
        ...

    def reduce_rows(self, result: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum ``source`` over the ranks. The collective is queued on the current stream, after the work that is there.
        If ``result`` is ``source``, sums in place (all-reduce). Otherwise the summed rows are cut into equal shares,
        and ``result`` of rank ``r`` gets share ``r`` (reduce-scatter)."""
        ...

"""``Transport``: one interface for what moves a schedule's pieces between GPUs. ``copy_engine`` and ``sm_push``
implement it.

``Transfer`` says what goes where, in rows; a transport prepares a part of it once (kernels compiled and loaded,
addresses of peers looked up) and then starts it with one call on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from overlap_inductor.runtime.workspace import Launch

TRANSPORTS = ("copy_engine", "sm_push")

Send = Callable[[torch.Tensor], None]
"""Start the transfer of a source ``[any rows, width]`` on the current stream, behind what stands there; the receivers'
flags are set when it has come."""


@dataclass(frozen=True)
class Piece:
    """``rows`` rows from row ``source`` of the sender's tensor to row ``target`` of ``peer``'s workspace."""

    peer: int
    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class Transfer:
    """A shard of ``rows`` rows of ``width`` elements to every peer, in parts of ``part_rows`` rows.

    Parts are numbered: ``u // parts + 1`` is how many ranks away the receiver of part ``u`` is, ``u % parts`` the part
    of its shard. One flag a part: ``index + u % parts`` of this source.

    Attributes:
        scattered: the source holds a shard for every rank, and ranks further on come first, so that their matmuls can
            be in the order of rows. Else one shard goes to all, ranks further back first: so the shards of ranks
            further on arrive first, and the receiver's matmuls can be in the order of rows.
        origin: first row in the source of what is sent (where ``scattered``: of rank 0's shard).
        base: row of every workspace where the shard from rank 0 goes; that from rank ``r`` goes ``r * rows`` rows
            behind.
    """

    rows: int
    width: int
    part_rows: int
    scattered: bool
    origin: int = 0
    base: int = 0
    index: int = 0

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part_rows)

    @property
    def direction(self) -> int:
        """Of the receivers, seen from the sender."""
        return 1 if self.scattered else -1

    def piece(self, number: int, rank: int, world_size: int) -> Piece:
        """What part ``number`` means on ``rank``."""
        peer = (rank + self.direction * (number // self.parts + 1)) % world_size
        start = number % self.parts * self.part_rows
        source = self.origin + (peer * self.rows if self.scattered else 0) + start
        return Piece(peer, source, self.base + rank * self.rows + start, min(self.part_rows, self.rows - start))


class Transport(Protocol):
    """What moves parts of a transfer, one after the other."""

    def prepare(
        self, launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor, guarded: bool = False
    ) -> Send:
        """Make parts ``numbers`` ready for launching; ``source``: an example of what will be sent, contiguous at 16
        bytes.

        Receivers are told of each part when it has come. Their credits have been awaited on the stream before a send is
        started. ``guarded``: what is sent rests on other waits of this call, too; where one was given up nobody is
        told.
        """
        ...

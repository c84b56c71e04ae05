# SPDX-License-Identifier: Apache-2.0
"""``Transfer`` says which rows of a shard go where in the peers' workspace. It holds plain numbers only.

A ``PeerCopies`` transport prepares parts of a transfer once: it compiles and loads kernels, and looks up the peers'
addresses. It then starts the parts with one call on the current stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.kernels.layout import FLAG_WORDS


@dataclass(frozen=True)
class Piece:
    """``rows`` rows from row ``source`` of the sender's tensor to row ``target`` of ``peer``'s workspace."""

    peer: int
    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class Transfer:
    """Sends a shard to every peer: ``rows`` rows of ``width`` elements each, in parts of ``part_rows`` rows.

    Parts are numbered. The receiver of part ``u`` is ``u // parts + 1`` ranks away, and ``u % parts`` is the part's
    number in its shard. Each part has one flag at its receiver: number ``index + u % parts`` of the sender's flags.

    Attributes:
        scattered: True if the source holds a different shard for each rank. The shards are sent to rank + 1, rank + 2,
            ... (modulo the number of ranks). So the sender can multiply rows in order, from the end of its own shard
            on, wrapping around. False if the same shard goes to all ranks. This shard is sent to rank - 1, rank - 2,
            ... So every rank receives the shard of rank + 1 first, and the receiver, too, can multiply rows in order
            from the end of its own shard on.
        origin: row of the source at which the shard begins (if ``scattered``, rank 0's shard).
        base: row of each peer's workspace to which the shard from rank 0 goes. The shard from rank ``r`` goes to row
            ``base + r * stride``.
        index: number of the first part's flag.
        read_in_order: True if scattered shards, too, are sent to rank - 1, rank - 2, ... The reason: the receiver
            multiplies the shard of rank + 1 first, then that of rank + 2, and so on.
        stride: rows from the start of one rank's shard to the start of the next rank's, in the source (if
            ``scattered``) and in the workspace. ``None``: ``rows``, so that shards follow each other. A larger stride
            sends a band of rows of each shard, as one part.

    Raises:
        ValueError: ``stride`` is less than ``rows``, or a shard with a larger stride is cut into parts.
    """

    rows: int
    width: int
    part_rows: int
    scattered: bool
    origin: int = 0
    base: int = 0
    index: int = 0
    read_in_order: bool = False
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.step < self.rows or self.step > self.rows > self.part_rows:
            raise ValueError(
                f"shards of {self.rows} rows in parts of {self.part_rows} rows begin every {self.step} rows;"
                " expected no overlap, and one part for each shard if there are gaps"
            )

    @property
    def step(self) -> int:
        """``stride``, or its default."""
        return self.rows if self.stride is None else self.stride

    @property
    def parts(self) -> int:
        """Parts of a shard; the last one may be shorter."""
        return -(-self.rows // self.part_rows)

    @property
    def direction(self) -> int:
        """Sign of the step from the sender to its receivers."""
        return 1 if self.scattered and not self.read_in_order else -1

    def flag(self, number: int, rank: int, world_size: int, signals: int) -> int:
        """Index of the flag of part ``number`` from ``rank``, in int32 words of the receiver's flags. ``signals``:
        number of flags that each source has in the slot."""
        return (world_size + rank * signals + self.index + number % self.parts) * FLAG_WORDS

    def piece(self, number: int, rank: int, world_size: int) -> Piece:
        """The rows that ``rank`` sends as part ``number``."""
        peer = (rank + self.direction * (number // self.parts + 1)) % world_size
        start = number % self.parts * self.part_rows
        source = self.origin + (peer * self.step if self.scattered else 0) + start
        return Piece(peer, source, self.base + rank * self.step + start, min(self.part_rows, self.rows - start))

# SPDX-License-Identifier: Apache-2.0
"""``Transfer``: which rows of a shard go where in the peers' workspace. It holds plain numbers only."""

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

    Part ``u`` goes to the receiver ``u // parts + 1`` ranks away. It is part ``u % parts`` of the shard. Its flag is
    number ``index + u % parts`` of the sender's flags at the receiver.

    A rank's matmul works through the other ranks' shards in the order rank + 1, rank + 2, ... (modulo the number of
    ranks). It computes shards that go to these ranks, or reads shards that come from them. So the receivers are in this
    order:

    * ``scattered``, not ``read_in_order``: rank + 1, rank + 2, ... The sender's matmul computes the shards in this
      order.
    * In all other transfers: rank - 1, rank - 2, ... Each receiver first gets the shard of its next rank. Of the
      other ranks' shards, its matmul reads this one first.

    Attributes:
        scattered: True if the source holds a shard for each rank. False if all ranks get the same shard.
        origin: row of the source at which the shard begins (if ``scattered``, rank 0's shard).
        base: first row of rank 0's shard in each peer's workspace. The shard from rank ``r`` goes to row ``base + r *
            stride``.
        index: number of the first part's flag.
        read_in_order: for a scattered source: True if the receivers' matmuls read the shards, False if the sender's
            matmul computes them.
        stride: rows from one rank's shard to the next rank's, in the workspace and in a scattered source. ``None``:
            ``rows``. If ``stride`` is larger than ``rows``, the transfer sends a band of each shard's rows, as one
            part.

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
        return self.rows if self.stride is None else self.stride

    @property
    def parts(self) -> int:
        """Parts of a shard; the last one may be shorter."""
        return -(-self.rows // self.part_rows)

    @property
    def direction(self) -> int:
        """1 if the receivers are rank + 1, rank + 2, ...; -1 if they are rank - 1, rank - 2, ..."""
        return 1 if self.scattered and not self.read_in_order else -1

    def flag(self, number: int, rank: int, world_size: int, signals: int) -> int:
        """Index of a part's flag, in int32 words of the receiver's flags. ``rank`` is the sender; ``signals`` is the
        number of flags per sender."""
        return (world_size + rank * signals + self.index + number % self.parts) * FLAG_WORDS

    def piece(self, number: int, rank: int, world_size: int) -> Piece:
        peer = (rank + self.direction * (number // self.parts + 1)) % world_size
        start = number % self.parts * self.part_rows
        source = self.origin + (peer * self.step if self.scattered else 0) + start
        return Piece(peer, source, self.base + rank * self.step + start, min(self.part_rows, self.rows - start))
